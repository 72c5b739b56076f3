"""The configuration page says what the code does."""

import importlib.util
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def test_the_page_is_what_the_fields_make() -> None:
    """If this fails: python scripts/configuration_page.py"""
    spec = importlib.util.spec_from_file_location("page", ROOT / "scripts" / "configuration_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page()


def _options(command: Any) -> set[str]:  # Any: a click command or group, vendored by typer
    own = {option for p in command.params for option in (*p.opts, *p.secondary_opts)}
    return own.union(*(_options(c) for c in getattr(command, "commands", {}).values()))


def test_every_flag_named_in_an_error_exists() -> None:
    """A remedy that names a flag which is not there would be a dead end."""
    from typer.main import get_command

    from moesaic.cli import app

    known = _options(get_command(app))
    for path in (ROOT / "src").rglob("*.py"):
        named = set(re.findall(r"(?<![\w`-])--[a-z][a-z-]+[a-z]", path.read_text(encoding="utf-8")))
        assert named - known - {"--no-deps"} == set(), path
