"""An engine in a thread of this process."""

import asyncio
import logging
import queue
import threading

from moesaic.engine.client import JOIN_TIMEOUT_S, TextEngineClient
from moesaic.engine.core import EngineCore
from moesaic.engine.detokenizer import Tokenizer
from moesaic.engine.loop import EngineLoop
from moesaic.engine.messages import Command, EngineDied, Event, Stop
from moesaic.errors import EngineDeadError

logger = logging.getLogger(__name__)


class _QueueSource:
    """Commands from a queue of this process."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.put = self._commands.put

    def take(self, *, may_wait: bool) -> Command | None:
        try:
            return self._commands.get(block=may_wait)
        except queue.Empty:
            return None


class ThreadEngineClient(TextEngineClient):
    """An ``EngineClient`` whose engine is one thread of this process; from ``start`` on the core is that thread's."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer | None) -> None:
        super().__init__(tokenizer)
        self._commands = _QueueSource()
        self._events: queue.SimpleQueue[list[Event] | None] = queue.SimpleQueue()
        self._engine = EngineLoop(core, self._commands, self._events.put)
        # Daemons: a step that never ends must not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._run, name="moesaic-engine", daemon=True),
            threading.Thread(target=self._receive_all, name="moesaic-text", daemon=True),
        ]

    def _send(self, command: Command) -> None:
        self._commands.put(command)

    async def start(self) -> None:
        if self._loop is not None:
            raise RuntimeError("this engine client has been started before; make a new one")
        self._loop = asyncio.get_running_loop()
        for thread in self._threads:
            thread.start()

    async def close(self) -> None:
        if self._end is None:
            self._end = EngineDied.of(EngineDeadError("it was closed"))
            self._send(Stop())
        if self._loop is None:
            return
        for thread in self._threads:
            await asyncio.to_thread(thread.join, JOIN_TIMEOUT_S)
            if thread.is_alive():
                logger.error("%s did not end within %.0f s; its requests are given up", thread.name, JOIN_TIMEOUT_S)
                self._die(self._end)

    def _run(self) -> None:
        try:
            self._engine.run()
        except BaseException as cause:
            logger.exception("engine failed; every request of it is given up")
            self._events.put([EngineDied.of(cause)])
        self._events.put(None)

    def _receive_all(self) -> None:
        try:
            while (events := self._events.get()) is not None:
                if not self._receive(events):
                    self._send(Stop())
        except BaseException as cause:
            logger.exception("text of an engine failed; every request of it is given up")
            self._send(Stop())
            self._receive([EngineDied.of(cause)])
