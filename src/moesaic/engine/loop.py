"""The body of an engine's own thread or process: commands in, events out, one core in between; no text."""

from collections.abc import Callable
from typing import Protocol

from moesaic.engine.core import EngineCore
from moesaic.engine.messages import (
    AbortRequests,
    AddRequests,
    Answer,
    Command,
    EngineDied,
    Event,
    NewRequest,
    PauseRequests,
    QueryStats,
    QuerySteps,
    Refusal,
    ResumeRequests,
    StepDone,
    Stop,
)
from moesaic.engine.supervisor import StepSupervisor
from moesaic.errors import RequestError


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
