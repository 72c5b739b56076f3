"""What HTTP costs: tokens per second of streams through a server, against its engine alone, in turns.

The engine's forward takes a set time and computes nothing, so both arms have the same ceiling. The clients are raw
sockets that keep bytes and look into them only after the clock has stopped; what they take of the CPU is reported.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moesaic.bench.arm import started_server
from moesaic.bench.client import Target
from moesaic.bench.paced import load_paced
from moesaic.bench.paced_server import paced_config
from moesaic.bench.paired import Pair, Spread, alternate, ratios
from moesaic.bench.progress import without_loading_bars
from moesaic.bench.report import Report
from moesaic.engine.core import EngineCore
from moesaic.errors import MoesaicError
from moesaic.kv.geometry import blocks_for_tokens
from moesaic.models.files import resolve_model_path
from moesaic.request import SamplingParams

BLOCK_SIZE = 16
PROMPT = "Hello"
TARGET = 0.8
"""The share of the engine's tokens per second that is to be left through HTTP."""
_TIMEOUT_S = 300.0

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadSettings:
    """The load of both arms."""

    num_streams: int = 64
    max_tokens: int = 1000
    """Long enough that what begins and ends apart, in the arm through HTTP, is a few per cent of it."""
    step_ms: float = 5.0
    """What a forward takes."""
    chat: bool = False
    """Ask for chat completions instead of completions."""
    num_pairs: int = 3

    @property
    def step_s(self) -> float:
        return self.step_ms / 1e3

    @property
    def num_kv_blocks(self) -> int:
        """Enough for all streams at once; a template adds a few tokens to the prompt."""
        return self.num_streams * (blocks_for_tokens(64 + self.max_tokens, BLOCK_SIZE) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """One run of one arm; seconds of CPU are of the whole run."""

    num_tokens: int
    seconds: float
    num_events: int = 0
    num_bytes: int = 0
    client_cpu_s: float = 0.0
    server_cpu_s: float = 0.0
    """Of the HTTP process."""
    engine_cpu_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def run_overhead(settings: OverheadSettings, progress: Progress) -> Report:
    """Return the comparison over the model ``tiny``, whose forward is left out.

    Raises: ``MoesaicError`` if the server does not come up or a stream is not whole.
    """
    path = resolve_model_path("tiny", progress=progress)
    config = paced_config(settings.num_streams, settings.num_kv_blocks)
    with without_loading_bars():
        core = load_paced(path, config, progress, step_s=settings.step_s)
    progress("start the server", 0.0)
    numbers = (settings.step_s, settings.num_streams, settings.num_kv_blocks)
    with started_server(("moesaic.bench.paced_server", str(path), *map(str, numbers)), str(path)) as target:

        def alone(i: int) -> Throughput:
            progress("pairs, the engine alone and through HTTP in turns", i / settings.num_pairs)
            return run_alone(core, settings)

        def served(i: int) -> Throughput:
            progress("pairs, the engine alone and through HTTP in turns", (i + 0.5) / settings.num_pairs)
            return run_served(target, settings)

        progress("warm up both", 0.0)
        run_alone(core, settings)
        run_served(target, settings)
        return report(settings, alternate(alone, served, settings.num_pairs))


def run_alone(core: EngineCore, settings: OverheadSettings) -> Throughput:
    """Run the load by calling the engine."""
    params = SamplingParams(max_tokens=settings.max_tokens, temperature=0.0, ignore_eos=True)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    for i in range(settings.num_streams):
        core.add_request(str(i), list(PROMPT.encode()), params)
    num_tokens = 0
    while core.has_pending_requests():
        num_tokens += sum(len(output.new_token_ids) for output in core.step())
    seconds = time.perf_counter() - started_s
    return Throughput(num_tokens=num_tokens, seconds=seconds, engine_cpu_s=time.process_time() - cpu_s)


def run_served(target: Target, settings: OverheadSettings) -> Throughput:
    """Run the load as clients of a server.

    Raises: ``MoesaicError`` if a stream lacks a token, has an error or does not end.
    """
    pids = () if target.pid is None else (target.pid, *_children(target.pid))
    before = [cpu_seconds(pid) for pid in pids]
    client_cpu_s = time.process_time()
    seconds, streams = asyncio.run(asyncio.wait_for(_load(target, settings), _TIMEOUT_S))
    client_cpu_s = time.process_time() - client_cpu_s
    used = [cpu_seconds(pid) - start for pid, start in zip(pids, before, strict=True)]
    counts = [check_stream(stream, settings.max_tokens) for stream in streams]
    return Throughput(
        num_tokens=len(counts) * settings.max_tokens,
        seconds=seconds,
        num_events=sum(counts),
        num_bytes=sum(map(len, streams)),
        client_cpu_s=client_cpu_s,
        server_cpu_s=used[0] if used else 0.0,
        engine_cpu_s=sum(used[1:]),
    )


def check_stream(data: bytes, num_tokens: int) -> int:
    """Return the number of content events in a whole reply (headers and chunked body).

    Raises: ``MoesaicError`` unless it is 200, has ``num_tokens`` letters of text and tokens, and ends with ``[DONE]``.
    """
    if not data.startswith(b"HTTP/1.1 200"):
        raise MoesaicError(f"a stream was refused: {data[:300]!r}")
    # Events are not cut by the chunks of the transfer coding: each is one write of the server.
    *events, done = [line[6:] for line in data.split(b"\r\n") if line.startswith(b"data: ")]
    text, last = "", {}
    for event in events:
        for part in event.strip().split(b"\n\ndata: "):
            last = json.loads(part)
            for choice in last.get("choices", ()):
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    counted = (last.get("usage") or {}).get("completion_tokens")
    if done.strip() != b"[DONE]" or len(text) != num_tokens or counted != num_tokens:
        raise MoesaicError(f"a stream has {len(text)} letters and {counted} of {num_tokens} tokens: {data[-300:]!r}")
    return len(events) - 1


class _Client(asyncio.Protocol):
    """Sends one request and keeps what comes."""

    def __init__(self, request: bytes, ended: "asyncio.Future[bytes]") -> None:
        self._request = request
        self._ended = ended
        self._parts: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._ended.set_result(b"".join(self._parts))


async def _load(target: Target, settings: OverheadSettings) -> tuple[float, list[bytes]]:
    """Return the seconds from the first request to the last byte, and all bytes of each stream."""
    loop = asyncio.get_running_loop()
    host, port = target.url.removeprefix("http://").rsplit(":", 1)
    request = _request(settings)
    ends: list[asyncio.Future[bytes]] = [loop.create_future() for _ in range(settings.num_streams)]
    started_s = time.perf_counter()
    for ended in ends:
        await loop.create_connection(partial(_Client, request, ended), host, int(port))
    streams = await asyncio.gather(*ends)
    return time.perf_counter() - started_s, streams


def _request(settings: OverheadSettings) -> bytes:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]} if settings.chat else {"prompt": PROMPT}
    asked |= {"max_tokens": settings.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(asked | {"stream_options": {"include_usage": True}}).encode()
    path = "/v1/chat/completions" if settings.chat else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: moesaic\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process of this machine has used; 0 where there is no ``/proc``."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    """Return the children of a process, the engine's among them (another keeps track of resources, and sleeps)."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    except OSError:
        return []


def report(settings: OverheadSettings, pairs: SequenceOf[Pair[Throughput, Throughput]]) -> Report:
    """Return table and samples; ``first`` of each pair is the engine alone."""
    alone, served = [p.first for p in pairs], [p.second for p in pairs]
    share = ratios((t.tokens_per_s for t in served), (t.tokens_per_s for t in alone))
    verdict = "met" if share.median >= TARGET else "missed"
    return Report(
        name="server overhead",
        settings=asdict(settings),
        columns=("arm", "tokens/s", "CPU us a token: HTTP", "engine", "clients"),
        rows=(
            ("engine alone", *_cells(alone)),
            ("through HTTP", *_cells(served)),
            ("share left, pair by pair", share.text(), "", "", ""),
        ),
        remarks=(
            f"Median (range) of n = {len(pairs)} pairs; at least {TARGET:.0%} is the target: {verdict}.",
            f"{served[0].num_events / served[0].num_tokens:.2f} events and "
            f"{served[0].num_bytes / served[0].num_tokens:.0f} bytes a token.",
            "The clients share this machine's CPU with the server: on few cores they lower what is left.",
        ),
        samples=tuple(
            {"pair": i, "arm": arm, **asdict(run)}
            for i, pair in enumerate(pairs)
            for arm, run in (("alone", pair.first), ("served", pair.second))
        ),
    )


def _cells(runs: SequenceOf[Throughput]) -> tuple[str, ...]:
    def us(seconds: Callable[[Throughput], float]) -> str:
        return Spread.of(1e6 * seconds(run) / run.num_tokens for run in runs).text(0)

    tokens = Spread.of(run.tokens_per_s for run in runs).text(0)
    return tokens, us(lambda r: r.server_cpu_s), us(lambda r: r.engine_cpu_s), us(lambda r: r.client_cpu_s)
