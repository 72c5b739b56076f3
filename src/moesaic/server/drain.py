"""A server that ends in order: newcomers are refused, the running may end, and a second signal ends at once."""

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import uvicorn

from moesaic.engine.client import EngineClient

logger = logging.getLogger(__name__)

LAST_WORDS_S = 2
"""How long replies whose requests have been ended may take to say so, in seconds."""

_LOOK_S = 0.05


class DrainingServer(uvicorn.Server):
    """While it drains, requests get 503 with Retry-After and ``/health`` says why; then the sockets close.

    Why not uvicorn's own way: it closes the sockets first, so that a balancer sees refused connections, and ends the
    process by the signal itself, so that a clean stop has no exit code 0.
    """

    def __init__(self, config: uvicorn.Config, engine: EngineClient, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_timeout_s = drain_timeout_s
        self._num_signals = 0
        self._drain: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain at the first signal, while this is entered in the main thread; signals are not raised again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self.handle_exit, each, None)
        try:
            yield
        finally:
            for each in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(each)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; at the second signal end at once."""
        self._num_signals += 1
        logger.warning("%s: %s", signal.Signals(sig).name, "draining" if self._num_signals == 1 else "ending at once")
        if self._num_signals > 1:
            self.should_exit = self.force_exit = True
        else:
            self._engine.drain()
            self._drain = asyncio.get_running_loop().create_task(self._exit_when_drained())

    async def _exit_when_drained(self) -> None:
        deadline_s = time.monotonic() + self._drain_timeout_s
        try:
            while self._engine.num_open_streams and time.monotonic() < deadline_s and not self.should_exit:
                await asyncio.sleep(_LOOK_S)
            if num_left := self._engine.num_open_streams:
                logger.warning("drain is over: %d requests are ended", num_left)
                await self._engine.close()  # they end with abort, and their replies say so
        finally:
            self.should_exit = True
