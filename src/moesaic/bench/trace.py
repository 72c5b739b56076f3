"""Steps as a trace that Perfetto opens: the JSON of the Trace Event Format.

Complete events (``ph`` X) for phases, counters (C) for rows, tokens and blocks, metadata (M) for names; times are in
microseconds. Source: "Trace Event Format", the Chromium project's document that Perfetto's importer follows.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from moesaic.bench.events import Recording, StepColumn, read_events
from moesaic.bench.steps import is_decision_log, read_all_steps
from moesaic.errors import ConfigError, MoesaicError

PHASES = ("plan", "launch", "commit")
_STEP_THREAD = 1
_FIRST_PROMPT_THREAD = 2
"""Threads from here on are requests whose prompts were computed."""
_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One step of a trace; seconds are of its process's own clock."""

    number: int
    start_s: float
    phases_s: tuple[float, float, float]
    """Planning, forward with sampling, and commit."""
    decode_rows: int
    chunks: tuple[tuple[str, int], ...]
    """Which request and how many of its prompt tokens."""
    kv_blocks: int
    gauges: tuple[tuple[str, int], ...] = ()
    """More counters, by name."""
    largest_itl_s: float | None = None

    @property
    def end_s(self) -> float:
        return self.start_s + sum(self.phases_s)


def trace_events(processes: dict[str, Iterable[TracedStep]]) -> dict[str, Any]:
    """Return the trace of each process's steps, by name (Any: JSON values); each starts at 0."""
    events: list[dict[str, Any]] = []
    for pid, (name, steps) in enumerate(processes.items(), 1):
        events += _process(pid, name, list(steps))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """Write a trace to ``path``; a folder that does not exist is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace, separators=(",", ":")) + "\n", encoding="utf-8")


def _process(pid: int, name: str, steps: list[TracedStep]) -> Iterator[dict[str, Any]]:
    requests = list(dict.fromkeys(request for step in steps for request, _ in step.chunks))
    threads = {request: _FIRST_PROMPT_THREAD + i for i, request in enumerate(requests)}
    names = {_STEP_THREAD: "steps", **{thread: f"prompt of {request}" for request, thread in threads.items()}}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
    for thread, text in names.items():
        yield {"ph": "M", "pid": pid, "tid": thread, "name": "thread_name", "args": {"name": text}}
        yield {"ph": "M", "pid": pid, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
    origin_s = steps[0].start_s if steps else 0.0
    for step in steps:
        yield from _step(pid, step, step.start_s - origin_s, threads)


def _step(pid: int, step: TracedStep, start_s: float, threads: dict[str, int]) -> Iterator[dict[str, Any]]:
    told: dict[str, float] = {"decode rows": step.decode_rows, "chunk tokens": sum(n for _, n in step.chunks)}
    if step.largest_itl_s is not None:
        told["largest gap, ms"] = round(1e3 * step.largest_itl_s, 3)
    total_s = step.end_s - step.start_s
    yield _slice(pid, _STEP_THREAD, f"step {step.number}", start_s, total_s, told)
    at_s = start_s
    for phase, seconds in zip(PHASES, step.phases_s, strict=True):
        yield _slice(pid, _STEP_THREAD, phase, at_s, seconds, {})
        at_s += seconds
    for request, number in step.chunks:
        args = {"step": step.number, "tokens": number}
        yield _slice(pid, threads[request], f"{number} tokens", start_s, total_s, args)
    counters = {"decode rows": step.decode_rows, "KV blocks used": step.kv_blocks, **dict(step.gauges)}
    for name, value in counters.items():
        yield {"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": _us(at_s), "args": {name: value}}
    # A counter keeps its value until the next: tokens by request, of which one may have none in this step.
    tokens = dict.fromkeys(threads, 0) | dict(step.chunks)
    if tokens:
        yield {"ph": "C", "pid": pid, "tid": 0, "name": "chunk tokens", "ts": _us(start_s), "args": tokens}


def _slice(pid: int, tid: int, name: str, start_s: float, seconds: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": _us(start_s), "dur": _us(seconds), "args": args}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)


# Where steps come from


def steps_of_columns(columns: Iterable[StepColumn]) -> list[TracedStep]:
    """Return the steps of a recording.

    Raises: ``ConfigError`` if it has no times.
    """
    return [_of_column(number, column) for number, column in enumerate(columns, 1)]


def _of_column(number: int, column: StepColumn) -> TracedStep:
    if column.times_s is None:
        raise ConfigError("the steps of this file have no times, as it is from before they were recorded; record again")
    start_s, *phases = column.times_s
    return TracedStep(
        number=number,
        start_s=start_s,
        phases_s=(phases[0], phases[1], phases[2]),
        decode_rows=column.decode_rows,
        chunks=column.chunks,
        kv_blocks=column.kv_blocks,
    )


def trace_of_recording(recording: Recording) -> dict[str, Any]:
    """Return the trace of a paired run: one process for each arm of ours, each from its first step on.

    Raises: ``ConfigError`` if no arm has steps, or they have no times.
    """
    if not any(recording.steps.values()):
        raise ConfigError("this file has no steps: no arm was a server of ours, or a request of its last pair failed")
    return trace_events({arm: steps_of_columns(columns) for arm, columns in recording.steps.items()})


def trace_of_file(path: Path) -> dict[str, Any]:
    """Return the trace of a decision log, or of the events that ``bench paired`` wrote.

    Raises: ``ConfigError`` if it is neither, or has no steps with times.
    """
    if is_decision_log(path):
        return trace_events({path.name: steps_of_columns(read_all_steps(path))})
    return trace_of_recording(read_events(path))


def watch_steps(
    url: str, seconds: float, api_key: str | None, progress: Callable[[float], None] = lambda share: None
) -> tuple[list[TracedStep], int]:
    """Return the steps that a server makes in the next ``seconds``, and how many were lost; blocks that long.

    ``progress`` is told the share of the time that has passed.
    Raises: ``MoesaicError`` if the server cannot be reached, has no feed or ends.
    """
    steps: list[TracedStep] = []
    num_lost = 0
    end_s = time.monotonic() + seconds
    root = url.rstrip("/").removesuffix("/v1")
    for event in _events(f"{root}/v1/steps", api_key, end_s):
        steps += map(_of_event, event["steps"])
        num_lost += event["num_lost"]
        progress(1 - max(0.0, end_s - time.monotonic()) / seconds)
    return steps, num_lost


def _of_event(step: dict[str, Any]) -> TracedStep:
    return TracedStep(
        number=step["number"],
        start_s=step["start_s"],
        phases_s=(step["plan_s"], step["launch_s"], step["commit_s"]),
        decode_rows=step["decode_rows"],
        chunks=tuple((f"request {request}", number) for request, number in step["chunks"]),
        kv_blocks=step["kv_blocks_used"],
        gauges=(("running", step["num_running"]), ("waiting", step["num_waiting"])),
        largest_itl_s=step["largest_itl_s"],
    )


def _events(url: str, api_key: str | None, end_s: float) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream until ``end_s`` (a monotonic time), however silent it is."""
    found = _connection(url)
    try:
        with closing(found) as connection:
            connection.connect()
            line_in = connection.sock  # the response may take the connection's, but not this name
            headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
            connection.request("GET", urlsplit(url).path, headers=headers)
            reply = connection.getresponse()
            if reply.status != HTTPStatus.OK:
                raise MoesaicError(f"{url} answers {reply.status}; {_remedy(reply.status)}")
            while (left_s := end_s - time.monotonic()) > 0:
                line_in.settimeout(left_s)
                line = reply.readline()
                if line.startswith(b"data: {"):
                    yield _event(json.loads(line.removeprefix(b"data: ")))
                elif not line or line.startswith(b"data: [DONE]"):
                    raise MoesaicError("the server ended the feed of its steps: it is stopping")
    except TimeoutError:
        if time.monotonic() < end_s:
            raise MoesaicError(f"{url} does not answer within {_CONNECT_TIMEOUT_S:.0f} s") from None
    except (OSError, HTTPException, ValueError) as error:
        raise MoesaicError(f"{url} cannot be read ({error}); is a server there?") from error


def _connection(url: str) -> HTTPConnection:
    """Not urllib's opener: that one hides the socket, whose time-out must shrink while the stream is silent."""
    parts = urlsplit(url)
    kinds: dict[str, type[HTTPConnection]] = {"http": HTTPConnection, "https": HTTPSConnection}
    kind = kinds.get(parts.scheme)
    if kind is None or not parts.hostname:
        raise ConfigError(f"{url!r} is no address of a server; pass one like http://127.0.0.1:8000")
    return kind(parts.hostname, parts.port, timeout=_CONNECT_TIMEOUT_S)


def _event(event: dict[str, Any]) -> dict[str, Any]:
    if "error" in event:
        raise MoesaicError(f"the server says: {event['error']['message']}")
    return event


def _remedy(status: int) -> str:
    return {
        401: "pass a key with --api-key",
        404: "start the server with --ui, which opens the feed",
        429: "others watch already; try again later",
    }.get(status, "its log has the cause")
