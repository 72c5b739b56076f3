"""A headless Chromium, driven over the DevTools protocol's pipe: no driver, no port, no package."""

import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_WITH_PIPE = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads commands from descriptor 3 and writes to 4; a pipe may have got either number, so both move first."""

_FLAGS = (
    "headless=new",
    "no-sandbox",
    "disable-gpu",
    "disable-dev-shm-usage",
    "no-first-run",
    "disable-background-networking",
    "remote-debugging-pipe",
)

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """Return the command of this machine's Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. Every wait ends: with an ``AssertionError`` after ``timeout_s`` seconds."""

    def __init__(self, to_fd: int, from_fd: int, timeout_s: float) -> None:
        self._to, self._from, self._timeout_s = to_fd, from_fd, timeout_s
        self._buffer = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.complaints: list[str] = []
        """What the page's console, the browser's log and uncaught errors said."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of one command of the protocol (Any: JSON values)."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end_s = time.monotonic() + self._timeout_s
        while (reply := self._receive(end_s)).get("id") != number:
            self._note(reply)
        assert "result" in reply, f"{method}: {reply.get('error')}"
        result: dict[str, Any] = reply["result"]
        return result

    def _receive(self, end_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, f"Chromium said nothing for {self._timeout_s} s"
            data = os.read(self._from, 1 << 16)
            assert data, "Chromium has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        received: dict[str, Any] = json.loads(message)
        return received

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled":
                self.complaints.append(str([argument.get("value") for argument in params["args"]]))
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])

    def open(self, url: str) -> None:
        """Go to ``url`` and wait until the page is loaded."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Return what a JavaScript expression gives, awaited (Any: a JSON value)."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        end_s = time.monotonic() + self._timeout_s
        while not self.value(condition):
            assert time.monotonic() < end_s, f"not within {self._timeout_s} s: {condition}; {self.complaints}"
            time.sleep(0.05)

    def press(self, key: str, *, code: int, text: str = "", ctrl: bool = False) -> None:
        """Press and release a key; ``code`` is its Windows virtual key code, as the protocol wants."""
        modifiers = 2 if ctrl else 0
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Put ``text`` where the focus is."""
        self.call("Input.insertText", text=text)


@contextmanager
def chromium(command: str, *, timeout_s: float = 60.0, width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """Start ``command`` headless with a profile of its own; it has ended when the block is left."""
    with ExitStack() as stack:
        # Chromium's helpers may write to the profile a moment longer than it lives itself.
        profile = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        (there, to_fd), (from_fd, back) = os.pipe(), os.pipe()
        flags = (*_FLAGS, f"window-size={width},{height}", f"user-data-dir={profile}")
        arguments = [f"--{flag}" for flag in flags]
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _WITH_PIPE, str(there), str(back), command, *arguments],
                pass_fds=(there, back),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        finally:
            os.close(there)
            os.close(back)
        stack.callback(os.close, from_fd)
        stack.callback(os.close, to_fd)
        stack.enter_context(process)
        stack.callback(_end, process)
        yield Browser(to_fd, from_fd, timeout_s)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
