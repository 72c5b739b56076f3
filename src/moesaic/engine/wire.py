"""Commands and events as bytes, for an engine in another process: MessagePack of the values themselves.

Both ends are this package in one version, so there is no schema to evolve. A message is a list of values, each a pair
of its class's name and its fields; msgspec encodes and checks dataclasses and named tuples by their annotations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

import moesaic.errors
from moesaic.engine.messages import (
    AbortRequests,
    AddRequests,
    Answer,
    EngineDied,
    PauseRequests,
    QueryStats,
    QuerySteps,
    Refusal,
    ResumeRequests,
    StepDone,
    Stop,
)
from moesaic.errors import InvariantError, MoesaicError, RequestError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """What an engine that is starting does, and the fraction done, in [0, 1]."""

    what: str
    fraction: float


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine serves from now on (Any: JSON values of its stats)."""

    stats: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The engine could not start: an error of ours by its class, any other by its name and message."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> "LoadFailed":
        return cls(type(error).__name__, str(error))

    def error(self) -> MoesaicError:
        """Return the error as it was raised, if it is one of ours."""
        kind = _error_class(self.kind, MoesaicError)
        return (
            MoesaicError(f"the engine did not start: {self.kind}: {self.message}")
            if kind is None
            else kind(self.message)
        )


@dataclass(frozen=True, slots=True)
class _Refused:
    """A ``Refusal`` in plain values."""

    ticket: int
    kind: str
    message: str
    param: str | None


@dataclass(frozen=True, slots=True)
class _Died:
    """An ``EngineDied``; its exception stays where it was raised, in the log."""

    reason: str


_PLAIN = (
    AbortRequests, AddRequests, Answer, EngineReady, LoadFailed, LoadProgress, PauseRequests, QueryStats,
    QuerySteps, ResumeRequests, StepDone, Stop, _Died, _Refused,
)  # fmt: skip
_DECODERS = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in _PLAIN}
_ENVELOPE = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw]])
_ENCODER = msgspec.msgpack.Encoder()


def encode(values: Sequence[Any]) -> bytes:
    """Return commands or events (Any: of several classes) as one message."""
    plain = [_to_plain(value) for value in values]
    return _ENCODER.encode([(type(value).__name__, value) for value in plain])


def decode(message: bytes) -> list[Any]:
    """Return the commands or events of one message (Any: of several classes).

    Raises: ``InvariantError`` for a message that ``encode`` did not make.
    """
    try:
        return [_from_plain(_DECODERS[name].decode(raw)) for name, raw in _ENVELOPE.decode(message)]
    except (msgspec.DecodeError, KeyError) as error:
        raise InvariantError(f"a message between server and engine cannot be read: {error}") from error


def _to_plain(value: Any) -> Any:
    match value:
        case Refusal(ticket, error):
            return _Refused(ticket, type(error).__name__, str(error), error.param)
        case EngineDied(reason):
            return _Died(reason)
        case _:
            return value


def _from_plain(value: Any) -> Any:
    match value:
        case _Refused(ticket, kind, message, param):
            make: Callable[..., RequestError] = _error_class(kind, RequestError) or RequestError
            return Refusal(ticket, make(message, param=param))
        case _Died(reason):
            return EngineDied(reason)
        case _:
            return value


def _error_class(name: str, base: type[T]) -> type[T] | None:
    found = getattr(moesaic.errors, name, None)
    return found if isinstance(found, type) and issubclass(found, base) else None
