"""Write docs/configuration.md from the fields of the settings; tests/test_configuration_page.py compares."""

from pathlib import Path

from moesaic.config import ConfigField, EngineConfig, config_fields
from moesaic.server.settings import ServerConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration

Made from the fields of `EngineConfig` and `ServerConfig` by `scripts/configuration_page.py`; do not edit by hand. Each
field is a flag and an environment variable (the flag wins); values of repeatable flags are separated by spaces in the
variable. All are judged before anything is allocated.

## Engine

Fields of `EngineConfig`: keywords of `LLM(model, ...)` and flags of the commands that load a model.

"""
SERVER = """
## Server

Fields of `ServerConfig`: flags of `moesaic serve`.

"""
TABLE = """| flag | variable | default | meaning |
|---|---|---|---|
"""


def row(field: ConfigField) -> str:
    """Return the table row of one field."""
    one_of = f" One of: {', '.join(field.choices)}." if field.choices else ""
    default = "none" if field.default in (None, ()) else str(field.default).lower()
    return f"| `{field.flag}` | `{field.variable}` | {default} | {field.help}{one_of} |\n"


def table(settings: type) -> str:
    """Return the table of one settings class."""
    return TABLE + "".join(map(row, config_fields(settings)))


def page() -> str:
    """Return the whole page."""
    return HEAD + table(EngineConfig) + SERVER + table(ServerConfig)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
