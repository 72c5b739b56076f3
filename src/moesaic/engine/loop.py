"""The body of an engine's own thread (later: process): commands in, events out, one core in between.

Commands and events are plain values, so that a pipe can carry them as well as a queue.
"""

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moesaic.engine.core import EngineCore, engine_dead
from moesaic.engine.outputs import OutputProcessor, TextDelta
from moesaic.engine.supervisor import StepSupervisor
from moesaic.errors import EngineDeadError, RequestError
from moesaic.request import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A request with the id that the client gave it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    priority: int = 0
    timeout_s: float | None = None
    arrival_s: float


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
class QueryStats:
    """Answered with the core's stats."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End unfinished requests with ``abort`` and leave the loop."""


Command = AddRequests | AbortRequests | QueryStats | Stop


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
class EngineDied:
    """The last event of an engine that failed."""

    cause: BaseException

    def error(self) -> EngineDeadError:
        """Return a new error for one waiter, its cause chained."""
        return engine_dead(self.cause)


Event = TextDelta | Answer | Refusal | EngineDied


class EngineLoop:
    """Owns a core and its texts; steps while there is work and sleeps in the command queue when there is none.

    ``emit`` gets the events of one round (the commands taken and one step) in one list, in order.
    """

    def __init__(
        self,
        core: EngineCore,
        outputs: OutputProcessor,
        commands: "queue.SimpleQueue[Command]",
        emit: Callable[[list[Event]], None],
    ) -> None:
        self._core = core
        self._supervisor = StepSupervisor(core)
        self._outputs = outputs
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
            if self._core.has_pending_requests():
                self._step()
            if self._events:
                events, self._events = self._events, []
                self._emit(events)

    def _take_commands(self) -> None:
        """Do every command that has come, in order; wait for one only if there is nothing else to do."""
        try:
            self._do(self._commands.get(block=not self._core.has_pending_requests()))
            while not self._is_stopping:
                self._do(self._commands.get_nowait())
        except queue.Empty:
            return

    def _do(self, command: Command) -> None:
        match command:
            case AddRequests():
                self._add(command)
            case AbortRequests(request_ids):
                self._end(request_ids)
            case QueryStats(ticket):
                self._events.append(Answer(ticket, self._supervisor.stats()))
            case Stop():
                self._end(tuple(s.request.request_id for s in self._core.scheduler.sequences))
                self._is_stopping = True

    def _add(self, command: AddRequests) -> None:
        try:
            for new in command.requests:
                self._core.add_request(
                    new.request_id,
                    new.prompt_token_ids,
                    new.sampling_params,
                    priority=new.priority,
                    timeout_s=new.timeout_s,
                )
                self._outputs.add(new.request_id, new.prompt, new.prompt_token_ids, new.sampling_params, new.arrival_s)
        except RequestError as error:
            for new in command.requests:
                self._core.abort_request(new.request_id)
                self._outputs.finish(new.request_id, "abort", time.monotonic())
            self._events.append(Refusal(command.ticket, error))
        else:
            self._events.append(Answer(command.ticket))

    def _end(self, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            self._core.abort_request(request_id)
            delta = self._outputs.finish(request_id, "abort", time.monotonic())
            if delta is not None:
                self._events.append(delta)

    def _step(self) -> None:
        outputs = self._supervisor.step()
        if self._core.death_cause is not None:
            # The last event of every stream, in place of one terminal delta for each.
            self._events.append(EngineDied(self._core.death_cause))
            self._is_stopping = True
            return
        step = self._outputs.process(outputs, time.monotonic())
        for request_id in step.aborts:
            self._core.abort_request(request_id)
        self._events += step.deltas
