"""The command as an operator runs it: it drains, ends at once when told twice, and says when its engine has died."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moesaic.cli import app
from moesaic.sched.replay import replay

pytestmark = pytest.mark.slow


class Server:
    """A ``moesaic serve`` process."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.process = process
        self.url = url

    def stream(self, max_tokens: int) -> Any:  # Any: a response
        """Begin a completion and return its response once the first event has come."""
        body = {"model": "t", "prompt": "Hello", "max_tokens": max_tokens, "temperature": 0, "stream": True}
        reply = self.post("/completions", body | {"ignore_eos": True})
        assert reply.readline().startswith(b"data: ")
        return reply

    def post(self, route: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{route}", data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=60)

    def health(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.url.removesuffix('/v1')}/health", timeout=60) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code

    def engine_pid(self) -> int:
        """The child that is the engine: the one spawned by multiprocessing."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        commands = {int(p): Path(f"/proc/{p}/cmdline").read_text() for p in children}
        return next(pid for pid, command in commands.items() if "spawn_main" in command)


@contextmanager
def serving(tiny_dir: Path, *flags: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "moesaic.cli", "serve", str(tiny_dir), "--port", "0", "--served-model-name", "t"]
    command += ["--device", "cpu", "--num-kv-blocks", "1024", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}) as process:
        assert process.stderr is not None
        try:
            url = next(match[1] for line in process.stderr if (match := re.search(r"URL +(http://\S+)", line)))
            threading.Thread(target=process.stderr.read, daemon=True).start()  # or it would wait for a reader
            yield Server(process, url)
        finally:
            process.kill()


def rest_of(reply: Any) -> list[dict[str, Any]]:
    events = [line.removeprefix(b"data: ") for line in reply.read().splitlines() if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_a_signal_lets_the_running_end_refuses_newcomers_and_leaves_a_whole_decision_log(
    tiny_dir: Path, tmp_path: Path
) -> None:
    log = tmp_path / "decisions.jsonl"
    with serving(tiny_dir, "--decision-log", str(log)) as server:
        reply = server.stream(max_tokens=1500)
        server.process.send_signal(signal.SIGTERM)
        for _ in range(1000):
            if server.health() == 503:
                break
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.post("/completions", {"model": "t", "prompt": "Hello", "max_tokens": 1})
        assert (caught.value.code, caught.value.headers["Retry-After"]) == (503, "1")
        assert rest_of(reply)[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(timeout=60) == 0
    replayed = CliRunner().invoke(app, ["replay", str(log)])
    assert replayed.exit_code == 0, replayed.output
    assert "no difference" in replayed.output
    assert "cut off" not in replayed.output
    assert int(replayed.output.split(" steps")[0]) >= 1500


def test_what_outlasts_the_drain_is_ended_and_told_and_in_the_decision_log(tiny_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    with serving(tiny_dir, "--drain-timeout-s", "0.2", "--decision-log", str(log)) as server:
        reply = server.stream(max_tokens=4000)
        server.process.send_signal(signal.SIGTERM)
        last = rest_of(reply)[-1]
        assert "error" in last or last["choices"][0]["finish_reason"] == "abort"
        assert server.process.wait(timeout=60) == 0
    result = replay(log)
    assert (result.first_difference, result.is_truncated) == (None, False)
    assert result.num_commands >= 2, "the request and its end"


def test_a_second_signal_ends_at_once(tiny_dir: Path) -> None:
    with serving(tiny_dir) as server:
        server.stream(max_tokens=4000)
        server.process.send_signal(signal.SIGINT)
        for _ in range(1000):
            if server.health() == 503:
                break
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=30) == 0


def test_a_killed_engine_turns_health_red_and_is_in_the_exit_code(tiny_dir: Path) -> None:
    with serving(tiny_dir) as server:
        reply = server.stream(max_tokens=4000)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert "SIGKILL" in rest_of(reply)[-1]["error"]["message"]
        assert server.health() == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 1


def test_a_killed_engine_comes_back_if_that_is_wanted(tiny_dir: Path) -> None:
    with serving(tiny_dir, "--restart-engine") as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        seen = set()
        for _ in range(100_000):
            seen.add(status := server.health())
            if status == 200 and 503 in seen:
                break
        body = {"model": "t", "prompt": "Hello", "max_tokens": 3}
        assert json.load(server.post("/completions", body))["usage"]["completion_tokens"] == 3
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0


def test_both_processes_log_json_and_no_text_of_a_request(tiny_dir: Path) -> None:
    command = [sys.executable, "-m", "moesaic.cli", "serve", str(tiny_dir), "--port", "0", "--served-model-name", "t"]
    command += ["--device", "cpu", "--num-kv-blocks", "64", "--log-format", "json", "--log-level", "info"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}) as process:
        assert process.stderr is not None
        lines: list[str] = []
        try:
            for line in process.stderr:
                lines.append(line)
                if match := re.search(r"URL +(http://\S+)", line):
                    break
            assert match is not None
            body = {"model": "t", "prompt": "the treasure lies under the oak", "max_tokens": 2}
            assert Server(process, match[1]).post("/completions", body).status == 200
            process.send_signal(signal.SIGTERM)
            lines += process.stderr.readlines()
            assert process.wait(60) == 0
        finally:
            process.kill()
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    assert {entry["process"] for entry in entries} == {"server", "engine"}
    assert [e["finish_reason"] for e in entries if e["message"].startswith("request over")] == ["length"]
    assert "treasure" not in "".join(lines)
