"""What goes between an engine's clients and its loop: commands in, events out.

Plain values, so that a pipe can carry them as well as a queue; nothing here needs torch.
"""

from dataclasses import dataclass
from typing import Any

from moesaic.errors import EngineDeadError, RequestError
from moesaic.request import SamplingParams, StepOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A request under the id that its client gave it; a sibling has the prompt of ``sibling_of``, none of its own."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    priority: int = 0
    timeout_s: float | None = None
    sibling_of: str | None = None


@dataclass(frozen=True, slots=True)
class AddRequests:
    """Begin all of these requests or, if one is refused, none; answered."""

    ticket: int
    requests: tuple[NewRequest, ...]


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """End these requests; ids that are unknown or over change nothing. Not answered."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PauseRequests:
    """Set these requests aside; ids that are unknown, over or paused change nothing. Not answered."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResumeRequests:
    """Let these paused requests go on; other ids change nothing. Not answered."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QueryStats:
    """Answered with the core's stats."""

    ticket: int


@dataclass(frozen=True, slots=True)
class QuerySteps:
    """Answered with the core's steps behind the one with the number ``after``; see ``StepLog.after``."""

    ticket: int
    after: int | None


@dataclass(frozen=True, slots=True)
class Stop:
    """End unfinished requests with ``abort`` and leave the loop."""


Command = AddRequests | AbortRequests | PauseRequests | ResumeRequests | QueryStats | QuerySteps | Stop


@dataclass(frozen=True, slots=True)
class Answer:
    """A command was done; Any: the value is of the command's own kind."""

    ticket: int
    value: Any = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A command was refused and changed nothing."""

    ticket: int
    error: RequestError


@dataclass(frozen=True, slots=True)
class StepDone:
    """What each request got, by a step or by a command."""

    outputs: tuple[StepOutput, ...]


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The last event of an engine that failed."""

    reason: str
    cause: BaseException | None = None
    """None if the engine was another process, whose exceptions stay there."""

    @classmethod
    def of(cls, cause: BaseException) -> "EngineDied":
        return cls(f"{type(cause).__name__}: {cause}", cause)

    def error(self) -> EngineDeadError:
        """Return a new error for one waiter, its cause chained; a shared one would gather all their tracebacks."""
        error = EngineDeadError(f"the engine has stopped: {self.reason}")
        error.__cause__ = self.cause
        return error


Event = StepDone | Answer | Refusal | EngineDied
