"""The body of an engine's own thread or process: commands in, events out, one core in between; no text.

Commands and events are plain values, so that a pipe can carry them as well as a queue.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from moesaic.engine.core import EngineCore
from moesaic.engine.supervisor import StepSupervisor
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


class CommandSource(Protocol):
    """Where commands come from, in the order in which they were given: add and cancel are never seen the other way."""

    def take(self, *, may_wait: bool) -> Command | None:
        """Return the next command; None if there is none, which with ``may_wait`` means that the sender is gone."""


class EngineLoop:
    """Owns a core; steps while there is work and sleeps in the command source when there is none.

    ``emit`` gets the events of one round (the commands taken and one step) in one list, in order.
    """

    def __init__(self, core: EngineCore, commands: CommandSource, emit: Callable[[list[Event]], None]) -> None:
        self._core = core
        self._supervisor = StepSupervisor(core)
        self._commands = commands
        self._emit = emit
        self._events: list[Event] = []
        self._is_stopping = False

    def run(self) -> None:
        """Serve until ``Stop`` or until the engine gives up, then told by ``EngineDied``; blocks.

        Any exception outside a step goes through.
        """
        while not self._is_stopping:
            self._take_commands()
            if self._core.has_pending_requests() and not self._is_stopping:
                self._step()
            if self._events:
                events, self._events = self._events, []
                self._emit(events)

    def _take_commands(self) -> None:
        """Do every command that has come, in order; wait for one only if there is nothing else to do."""
        may_wait = not self._core.has_pending_requests() and not self._events
        while not self._is_stopping and (command := self._commands.take(may_wait=may_wait)) is not None:
            self._do(command)
            may_wait = False
        if may_wait:
            self._stop()  # nobody is left to serve

    def _do(self, command: Command) -> None:
        match command:
            case AddRequests():
                self._add(command)
            case AbortRequests(request_ids):
                for request_id in request_ids:
                    self._core.abort_request(request_id)
            case PauseRequests(request_ids):
                for request_id in request_ids:
                    self._core.pause_request(request_id)
            case ResumeRequests(request_ids):
                for request_id in request_ids:
                    self._core.resume_request(request_id)
            case QueryStats(ticket):
                self._events.append(Answer(ticket, self._supervisor.stats()))
            case QuerySteps(ticket, after):
                self._events.append(Answer(ticket, self._core.steps_after(after)))
            case Stop():
                self._stop()

    def _add(self, command: AddRequests) -> None:
        try:
            for new in command.requests:
                self._add_one(new)
        except RequestError as error:
            for new in command.requests:
                self._core.abort_request(new.request_id)
            self._events.append(Refusal(command.ticket, error))
        else:
            self._events.append(Answer(command.ticket))

    def _add_one(self, new: NewRequest) -> None:
        core, params, priority, timeout_s = self._core, new.sampling_params, new.priority, new.timeout_s
        if new.sibling_of is None:
            core.add_request(new.request_id, new.prompt_token_ids, params, priority=priority, timeout_s=timeout_s)
        else:
            core.add_sibling(new.request_id, new.sibling_of, params, priority=priority, timeout_s=timeout_s)

    def _stop(self) -> None:
        for sequence in self._core.scheduler.sequences:
            self._core.abort_request(sequence.request.request_id)
        if outputs := self._core.scheduler.take_events():
            self._events.append(StepDone(tuple(outputs)))
        self._is_stopping = True

    def _step(self) -> None:
        outputs = self._supervisor.step()
        if self._core.death_cause is not None:
            # The last event of every stream, in place of one terminal output for each.
            self._events.append(EngineDied.of(self._core.death_cause))
            self._is_stopping = True
        elif outputs:
            self._events.append(StepDone(tuple(outputs)))
