"""The HTTP server's settings, beside those of the engine."""

import dataclasses
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moesaic.config import check_at_least, check_types
from moesaic.errors import ConfigError
from moesaic.log import LogFormat, LogLevel, LogSettings

ToolCallParser = Literal["auto", "hermes", "mistral", "none"]
ReasoningParser = Literal["auto", "think", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of one HTTP server; flags of ``moesaic serve`` have the same names.

    Raises: ``ConfigError`` with value, limit and remedy, before anything is loaded.
    """

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    served_model_name: tuple[str, ...] = ()
    """Name that clients send as model; repeatable, the first is the one in replies. The default is MODEL."""
    tool_call_parser: ToolCallParser = "auto"
    """How the model writes tool calls; auto looks at its chat template."""
    reasoning_parser: ReasoningParser = "auto"
    """How the model marks its reasoning; auto looks for </think> in its chat template."""
    drain_timeout_s: float = 30.0
    """How long running requests may go on after a signal to stop, in seconds; at least 0. A second signal ends them."""
    restart_engine: bool = False
    """Start the engine's process again when it dies; requests in flight fail, later ones are served."""
    strict_api: bool = False
    """Refuse requests with fields that no one here reads, instead of ignoring them."""
    sse_ping_interval_s: float = 15.0
    """Silence in a stream after which a comment keeps its connection open, in seconds; above 0."""
    trust_request_chat_template: bool = False
    """Render the chat_template of a request, in a sandbox that does not limit its time."""
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """Key that clients must send; repeatable. The default is none: everyone who reaches the port is served."""
    api_key_file: str | None = None
    """File with more keys, one a line; it is read once, at start."""
    allowed_origins: tuple[str, ...] = ()
    """Origin whose pages browsers may let call this server, or *; repeatable. The default is none."""
    max_body_bytes: int = 32 * 2**20
    """Largest body of a request, in bytes, at least 1; larger ones are refused before they are read."""
    max_header_bytes: int = 64 * 2**10
    """Largest request line and headers of a request together, in bytes, at least 1024."""
    max_prompts_per_request: int = 1024
    """Most prompts in one completions request, each counted n times, at least 1."""
    log_level: LogLevel = "warning"
    """Least level of what is logged to standard error; info has a line for each request, nothing of its text."""
    log_format: LogFormat = "text"
    """Form of log records: lines of text, or JSON objects with their fields, one a line."""
    otlp_traces_endpoint: str | None = None
    """URL that takes OpenTelemetry spans of requests, OTLP over HTTP; needs moesaic[otel]. The default is none."""
    ui: bool = False
    """Serve a page at /ui to try the model and watch its steps, and their counts and times at /v1/steps."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Return if every field holds. Raises: ``ConfigError`` naming the first broken one."""
        _check_keys(self.api_key, "api_key")
        check_types(self)
        if self.otlp_traces_endpoint is not None:
            _check_tracing(self.otlp_traces_endpoint)
        check_at_least("port", self.port, 0)
        if self.port > 65535:
            raise ConfigError(f"port is {self.port}; it must be at most 65535; lower --port")
        if not self.sse_ping_interval_s > 0:
            raise ConfigError(
                f"sse_ping_interval_s is {self.sse_ping_interval_s}; it must be above 0; raise --sse-ping-interval-s"
            )
        check_at_least("drain_timeout_s", self.drain_timeout_s, 0)
        check_at_least("max_body_bytes", self.max_body_bytes, 1)
        check_at_least("max_header_bytes", self.max_header_bytes, 1024)
        check_at_least("max_prompts_per_request", self.max_prompts_per_request, 1)
        for origin in self.allowed_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ConfigError(f"allowed_origins has {origin!r}; an origin is * or scheme://host[:port]")

    @property
    def log(self) -> LogSettings:
        """What every process is told of logging."""
        return LogSettings(self.log_level, self.log_format)

    def keys(self) -> tuple[str, ...]:
        """Return every key that opens the server, those of ``api_key_file`` too; none means that it is open.

        Raises: ``ConfigError`` if the file cannot be read or holds no key.
        """
        return self.api_key + (() if self.api_key_file is None else _keys_in(Path(self.api_key_file)))

    def shown(self) -> dict[str, Any]:
        """Return what ``/v1/config`` may show (Any: JSON values): of the keys that there are some, and no more."""
        public = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "api_key"}
        return {**public, "requires_api_key": bool(self.api_key or self.api_key_file)}


def _keys_in(file: Path) -> tuple[str, ...]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the keys in {file} cannot be read ({type(error).__name__}); check --api-key-file"
        ) from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError(f"{file} holds no key, so the server would be open; write one a line or drop --api-key-file")
    _check_keys(keys, f"api_key_file {file}")
    return keys


def _check_keys(keys: Any, where: str) -> None:  # Any: whatever the caller gave
    """Refuse keys that no header can carry. A message never holds a key."""
    if not isinstance(keys, tuple) or not all(isinstance(key, str) for key in keys):
        raise ConfigError(f"{where} is a {type(keys).__name__}; it must be a tuple of texts")
    for number, key in enumerate(keys, 1):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"key {number} of {where} is empty or has a character that is no visible ASCII; change it"
            )


def _check_tracing(endpoint: str) -> None:
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_traces_endpoint is {endpoint!r}; it must be an http or https URL like "
            "http://127.0.0.1:4318/v1/traces; change --otlp-traces-endpoint"
        )
    if not _is_installed("opentelemetry.exporter.otlp.proto.http.trace_exporter"):
        raise ConfigError(
            "otlp_traces_endpoint is set but OpenTelemetry is not installed; "
            "pip install 'moesaic[otel]' or leave out --otlp-traces-endpoint"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package on the way is missing
        return False
