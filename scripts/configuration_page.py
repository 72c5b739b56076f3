"""Write docs/configuration.md from the fields of EngineConfig; tests/test_configuration_page.py compares."""

from pathlib import Path
from typing import get_args

from moesaic.config import ConfigField, config_fields

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration

Made from the fields of `EngineConfig` by `scripts/configuration_page.py`; do not edit by hand. Each field is a keyword
of `LLM(model, ...)`, a flag of the commands that load a model, and an environment variable (the flag wins). One
function, `EngineConfig.validate()`, judges all three before anything is allocated.

| flag | variable | default | meaning |
|---|---|---|---|
"""


def row(field: ConfigField) -> str:
    """Return the table row of one field."""
    choices = [c for c in get_args(field.hint) if isinstance(c, str)]
    one_of = f" One of: {', '.join(choices)}." if choices else ""
    default = "none" if field.default is None else str(field.default).lower()
    return f"| `{field.flag}` | `MOESAIC_{field.name.upper()}` | {default} | {field.help}{one_of} |\n"


def page() -> str:
    """Return the whole page."""
    return HEAD + "".join(map(row, config_fields()))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
