"""What tests of the compiled kernels need: specdec installed where there was a C compiler."""

import pytest

from specdec.engine.native import kernels

NO_KERNEL = "specdec was installed without a C compiler"
needs_kernel = pytest.mark.skipif(kernels() is None, reason=NO_KERNEL)
