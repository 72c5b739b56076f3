"""An engine in a process of its own: spawned, supervised, and gone when either side is.

    event loop ── PUSH ──> commands ──> PULL ── engine's thread     (child)
    receiver  <── PULL <── events  <── PUSH ── engine's thread

Sockets are ipc in a private folder; each belongs to one thread. The child dies with its parent, ignores the signals
that a terminal sends to the whole group, and leaves its exceptions in the log: the parent gets their names.
"""

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from moesaic.config import EngineConfig
from moesaic.engine.client import JOIN_TIMEOUT_S, TextEngineClient
from moesaic.engine.detokenizer import Tokenizer
from moesaic.engine.garbage import keep_collections_short
from moesaic.engine.messages import Command, EngineDied, Event, Stop
from moesaic.engine.outputs import OutputProcessor
from moesaic.engine.wire import EngineReady, LoadFailed, LoadProgress, decode, encode
from moesaic.errors import EngineDeadError
from moesaic.log import LogSettings, configure_logging

if TYPE_CHECKING:
    from moesaic.engine.core import EngineCore

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
CoreFactory = Callable[[Path, EngineConfig, Progress], "EngineCore"]
"""Makes the core in the child; a function of a module, since only its name crosses."""

FIRST_RESTART_DELAY_S = 1.0
LONGEST_RESTART_DELAY_S = 60.0
"""Delays double from the first to the longest while engines keep dying before they have served that long."""

_POLL_MS = 200


def load_core(path: Path, config: EngineConfig, progress: Progress) -> "EngineCore":
    """Return the engine that serves ``path``, ready for grammars too."""
    from moesaic.engine.core import EngineCore

    core = EngineCore.from_path(path, config, progress)
    core.prepare_grammars()
    return core


class ProcessEngineClient(TextEngineClient):
    """An ``EngineClient`` whose engine is a process; ``launch`` it, then ``start`` the client on an event loop.

    With ``restarts`` an engine that dies is replaced: requests in flight fail, later ones wait for nothing and are
    refused until the new one is ready.
    """

    def __init__(
        self,
        path: Path,
        config: EngineConfig,
        load_tokenizer: Callable[[], Tokenizer | None],
        *,
        restarts: bool = False,
        make_core: CoreFactory = load_core,
        log: LogSettings = LogSettings(),  # noqa: B008  # immutable
    ) -> None:
        """``load_tokenizer`` is called while the engine's process starts."""
        super().__init__(None)
        self._load_tokenizer = load_tokenizer
        self._arguments = (path, config, make_core, log)
        self._restarts = restarts
        self._is_closing = False
        self._has_failed = False
        self._engine: _Engine | None = None
        self._receiver = threading.Thread(target=self._supervise, name="moesaic-text", daemon=True)

    def launch(self, progress: Progress | None = None) -> dict[str, Any]:
        """Start the engine and wait until it serves; return its stats (Any: JSON values).

        Raises: ``ConfigError``, ``ModelLoadError`` as the engine raised them, ``EngineDeadError`` if it died.
        """
        self._engine = _Engine(*self._arguments)
        try:
            self._outputs = OutputProcessor(self._load_tokenizer())
            return self._engine.wait_until_ready(progress)
        except BaseException:
            self._engine.close(patience_s=0.0)
            raise

    @property
    def exit_code(self) -> int:
        """0 while nothing is wrong; 1 once an engine has died and was not replaced."""
        return int(self._has_failed or (self._end is not None and not self._is_closing))

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return None if self._engine is None else self._engine.process.pid

    async def start(self) -> None:
        if self._loop is not None:
            raise RuntimeError("this engine client has been started before; make a new one")
        if self._engine is None:
            raise EngineDeadError("the engine has not been launched; call launch() first")
        self._loop = asyncio.get_running_loop()
        self._receiver.start()

    async def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if self._end is None:
            self._send(Stop())
            self._end = EngineDied.of(EngineDeadError("it was closed"))
        else:
            self._has_failed = True
        if self._receiver.is_alive():
            await asyncio.to_thread(self._receiver.join, JOIN_TIMEOUT_S)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    def _send(self, command: Command) -> None:
        assert self._engine is not None  # start() asks for it
        self._engine.send(command)

    # On the receiver

    def _supervise(self) -> None:
        """Receive until the engine is gone; then tell everyone, and make a new one if that is wanted."""
        delay_s = FIRST_RESTART_DELAY_S
        while True:
            began_s, engine = time.monotonic(), self._engine
            assert engine is not None  # start() asks for it
            reason = self._receive_all(engine)
            if self._is_closing or reason is None:
                return
            logger.error("engine process failed: %s", reason)
            self._receive([EngineDied(reason)])
            if not self._restarts:
                return
            engine.close()
            lived_long = time.monotonic() - began_s > LONGEST_RESTART_DELAY_S
            delay_s = FIRST_RESTART_DELAY_S if lived_long else min(2 * delay_s, LONGEST_RESTART_DELAY_S)
            if not self._replace(delay_s):
                return

    def _receive_all(self, engine: "_Engine") -> str | None:
        """Hand on events until there can be no more; return why the engine is gone, None if it was asked to end."""
        try:
            while (events := engine.receive()) is not None:
                died = next((event for event in events if isinstance(event, EngineDied)), None)
                if died is not None:
                    self._receive([event for event in events if event is not died])
                    return died.reason
                if not self._receive(events):
                    return None
        except Exception as error:
            logger.exception("events of the engine cannot be read; its requests are given up")
            return f"{type(error).__name__}: {error}"
        return engine.end()

    def _replace(self, delay_s: float) -> bool:
        """Make a new engine; False if the client is closed meanwhile or the new one does not start."""
        deadline_s = time.monotonic() + delay_s
        while time.monotonic() < deadline_s:
            if self._is_closing:
                return False
            time.sleep(0.05)
        logger.warning("engine process is started again")
        try:
            self._engine = _Engine(*self._arguments)
            self._engine.wait_until_ready(None)
        except Exception as error:
            logger.exception("engine process cannot be started again")
            self._receive([EngineDied(f"{type(error).__name__}: {error}")])
            return False
        self._outputs.clear()
        assert self._loop is not None  # this runs after start()
        with contextlib.suppress(RuntimeError):  # the event loop has gone: nobody is left to serve
            self._loop.call_soon_threadsafe(self._revive)
        return True

    def _revive(self) -> None:
        if not self._is_closing:
            self._end = None


class _Engine:
    """One child process and the parent's ends of its sockets."""

    def __init__(self, path: Path, config: EngineConfig, make_core: CoreFactory, log: LogSettings) -> None:
        # Only its owner may enter a folder made by mkdtemp, and nobody else may connect to a socket inside.
        self._folder = Path(tempfile.mkdtemp(prefix="moesaic-"))
        self._context = zmq.Context()
        self._commands = _socket(self._context, zmq.PUSH)
        self._commands.bind(_address(self._folder, "commands"))
        self._events = _socket(self._context, zmq.PULL)
        self._events.bind(_address(self._folder, "events"))
        spawn = multiprocessing.get_context("spawn")  # fork would copy threads' locks and a CUDA context
        self.process: BaseProcess = spawn.Process(
            target=_run_child,
            args=(str(self._folder), path, config, make_core, log),
            name="moesaic-engine",
            daemon=True,
        )
        self.process.start()

    def send(self, command: Command) -> None:
        """Queue a command; never blocks. For one thread. One to an engine that is gone is lost, as its events say."""
        with contextlib.suppress(zmq.Again):
            self._commands.send(encode([command]), zmq.NOBLOCK)

    def wait_until_ready(self, progress: Progress | None) -> dict[str, Any]:
        """Return the stats of the engine once it serves. Raises: what it raised, ``EngineDeadError`` if it died."""
        while (messages := self.receive()) is not None:
            for message in messages:
                match message:
                    case LoadProgress(what, fraction):
                        if progress is not None:
                            progress(what, fraction)
                    case LoadFailed():
                        self.process.join(JOIN_TIMEOUT_S)  # it ends by itself
                        raise message.error()
                    case EngineReady(stats):
                        return stats
        raise EngineDeadError(f"the engine has stopped: {self.end() or 'it ended while it was loading'}")

    def receive(self) -> list[Any] | None:
        """Return the next message (Any: of several classes); None if the process is gone and nothing is left."""
        while not self._events.poll(_POLL_MS if self.process.is_alive() else 0):
            if not self.process.is_alive() and not self._events.poll(0):
                return None
        return decode(self._events.recv())

    def end(self) -> str | None:
        """Wait for the process, which is gone, and return what is wrong with how it ended; None if nothing is."""
        self.process.join(JOIN_TIMEOUT_S)
        code = self.process.exitcode
        if code is None or code == 0:
            return None
        if code < 0:
            return f"the engine's process was ended by {signal.Signals(-code).name}"
        return f"the engine's process ended with exit code {code}"

    def close(self, patience_s: float = JOIN_TIMEOUT_S) -> None:
        """Make sure that the process is gone, and free the sockets and their folder. Safe to call twice."""
        self.process.join(patience_s)
        if self.process.is_alive():
            if patience_s:
                logger.error("engine process did not end within %.0f s and is killed", patience_s)
            self.process.kill()
            self.process.join()
        self._commands.close(linger=0)
        self._events.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


def _socket(context: "zmq.Context[Any]", kind: int) -> "zmq.Socket[Any]":
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.set_hwm(0)  # max_tokens bounds what can wait here
    socket.linger = 0
    return socket


def _address(folder: Path, name: str) -> str:
    return f"ipc://{folder / name}"


# In the child


class _SocketSource:
    """Commands from the parent."""

    def __init__(self, socket: "zmq.Socket[Any]") -> None:
        self._socket = socket
        self._taken: list[Command] = []

    def take(self, *, may_wait: bool) -> Command | None:
        if not self._taken:
            if not may_wait and not self._socket.poll(0):
                return None
            self._taken = decode(self._socket.recv())
        return self._taken.pop(0)


def _run_child(folder: str, path: Path, config: EngineConfig, make_core: CoreFactory, log: LogSettings) -> None:
    """The whole life of the engine's process; only here is torch needed."""
    _die_with_parent()
    for each in (signal.SIGINT, signal.SIGTERM):  # meant for the group; the parent decides
        signal.signal(each, signal.SIG_IGN)
    configure_logging(log, "engine")
    context = zmq.Context()
    events = _socket(context, zmq.PUSH)
    events.connect(_address(Path(folder), "events"))
    commands = _socket(context, zmq.PULL)
    commands.connect(_address(Path(folder), "commands"))

    def emit(values: list[Event] | list[Any]) -> None:
        events.send(encode(values))

    try:
        core = make_core(path, config, lambda what, fraction: emit([LoadProgress(what, fraction)]))
    except Exception as error:
        if not _is_ours(error):
            logger.exception("engine could not be loaded")
        emit([LoadFailed.of(error)])
        _finish(context, events, commands)
        return
    emit([EngineReady(core.stats())])
    from moesaic.engine.loop import EngineLoop

    try:
        keep_collections_short()
        EngineLoop(core, _SocketSource(commands), emit).run()
    except Exception as error:
        logger.exception("engine failed; every request of it is given up")
        emit([EngineDied.of(error)])
    _finish(context, events, commands)


def _is_ours(error: Exception) -> bool:
    from moesaic.errors import MoesaicError

    return isinstance(error, MoesaicError)


def _finish(context: "zmq.Context[Any]", events: "zmq.Socket[Any]", commands: "zmq.Socket[Any]") -> None:
    """Let the last events out, and no longer than a parent that is gone would take."""
    commands.close(linger=0)
    events.close(linger=5000)
    context.term()


def _die_with_parent() -> None:
    """End this process when its parent does: by the kernel on Linux, by a thread that waits for it elsewhere."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a child
    threading.Thread(target=_follow, args=(parent,), name="moesaic-parent", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of prctl(2)
        if not parent.is_alive():  # it ended before the call above
            os._exit(1)


def _follow(parent: BaseProcess) -> None:
    wait([parent.sentinel])
    os._exit(1)
