"""The HTTP server's settings, beside those of the engine."""

from dataclasses import dataclass
from typing import Literal

from moesaic.config import check_at_least, check_types
from moesaic.errors import ConfigError

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
    trust_request_chat_template: bool = False
    """Render the chat_template of a request, in a sandbox that does not limit its time."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Return if every field holds. Raises: ``ConfigError`` naming the first broken one."""
        check_types(self)
        check_at_least("port", self.port, 0)
        if self.port > 65535:
            raise ConfigError(f"port is {self.port}; it must be at most 65535; lower --port")
