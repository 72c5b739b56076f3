"""The one tree of errors. A message carries the value, the limit and the remedy."""

from dataclasses import dataclass


class MoesaicError(Exception):
    """Base of every error that Moesaic raises on purpose."""


class ConfigError(MoesaicError, ValueError):
    """An impossible setting, found before anything is allocated."""


class RequestError(MoesaicError, ValueError):
    """A request that is refused at the door; other requests are untouched.

    ``param`` names the offending field in the words of the client, or is None.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLargeError(RequestError):
    """Prompt and ``max_tokens`` can never fit the context or the KV pool."""


class DuplicateRequestError(RequestError):
    """A request id that is already in use by an unfinished request."""


class QueueFullError(RequestError):
    """As many requests wait as may wait; the client should try again later."""


class ModelLoadError(MoesaicError):
    """The model directory or one of its tensors is missing, broken or unreadable."""


class UnsupportedModelError(ModelLoadError):
    """A model family that is not proven to give right results here."""


class CapacityError(MoesaicError):
    """KV blocks were asked for that the pool does not have."""


class SamplingError(MoesaicError):
    """Logits from which no token can be chosen; ``rows`` are the sampling rows, the other rows are sound.

    ``own_fault_rows`` are those of them whose own parameters leave no token.
    """

    def __init__(self, message: str, *, rows: tuple[int, ...], own_fault_rows: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rows = rows
        self.own_fault_rows = own_fault_rows


class InvariantError(MoesaicError, AssertionError):
    """An internal rule is broken: always a bug in Moesaic, never the user's."""


class EngineDrainingError(MoesaicError):
    """The engine takes no more requests because it is being stopped; those that run may end."""


class EngineDeadError(MoesaicError, RuntimeError):
    """The engine has stopped and serves nothing any more; the cause is chained."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A negative answer with its reason, returned where absence alone would say too little."""

    reason: str
    needed: int | None = None
    limit: int | None = None

    def __str__(self) -> str:
        if self.needed is None:
            return self.reason
        return f"{self.reason} (needed {self.needed}, limit {self.limit})"
