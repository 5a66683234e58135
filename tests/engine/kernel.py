"""What tests of the compiled attention kernel need: specdec installed where there was a C compiler."""

import pytest

from specdec.engine import compiled

NO_KERNEL = "specdec was installed without a C compiler"
needs_kernel = pytest.mark.skipif(compiled.kernel() is None, reason=NO_KERNEL)
