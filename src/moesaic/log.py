"""How log records are written, the same in every process of a server: lines of text, or of JSON."""

import json
import logging
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

FIELDS = "fields"
"""The ``extra`` of a record whose values stand by themselves in JSON: ``logger.info(..., extra={FIELDS: {...}})``."""

_TEXT = "%(levelname)s %(message)s"


class LogSettings(NamedTuple):
    """What every process of a server is told."""

    level: LogLevel = "warning"
    format: LogFormat = "text"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, process, logger, message, the record's fields, any exception."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure_logging(settings: LogSettings, process: str) -> None:
    """Write all records of this process, libraries' too, to standard error; replaces what was configured before."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if settings.format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
