"""The planted bugs of ``make mutants`` still have their places; whether they are noticed takes minutes, not here."""

import importlib.util
import sys
from pathlib import Path

import pytest

import moesaic

SCRIPT = Path(__file__).parents[1] / "scripts" / "mutants.py"


def test_each_planted_bug_is_found_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, the code moved on: mend ``old`` in scripts/mutants.py."""
    spec = importlib.util.spec_from_file_location("mutants", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutants", module)
    spec.loader.exec_module(module)
    assert len(module.MUTANTS) >= 15
    assert len({m.bug for m in module.MUTANTS}) == len(module.MUTANTS)
    assert module.misplaced(Path(moesaic.__file__).parent) == []
