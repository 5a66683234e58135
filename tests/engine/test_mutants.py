"""Every planted bug is rejected by the test that guards against it."""

import pkgutil

import pytest

from specdec.engine import EngineError
from specdec.engine.native import kernels
from tests.engine.kernel import NO_KERNEL
from tests.engine.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_rejected(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant.is_of_kernel and kernels() is None:
        pytest.skip(NO_KERNEL)
    mutant.check()
    owner, _, attribute = mutant.target.rpartition(".")
    original = vars(pkgutil.resolve_name(owner))[attribute]
    monkeypatch.setattr(mutant.target, mutant.replace(original))
    with pytest.raises((AssertionError, EngineError, pytest.fail.Exception)):
        mutant.check()
