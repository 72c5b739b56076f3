"""What is asked of a server and when: seeded loads whose prompts share no prefix."""

import csv
import gzip
import io
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from importlib import resources
from typing import Literal, get_args

import numpy as np

from moesaic.errors import ConfigError

Workload = Literal["stall", "head-of-line", "conversation", "code", "agent", "churn", "pressure"]
Arrivals = Literal["trace", "poisson", "bursty"]
Role = Literal["decoder", "long"]
LEAD_IN_TOKENS = 4
BURST_SIZE = 8
"""Requests that arrive together when arrivals are bursty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """The size of a load. The defaults fit ``tiny`` and finish within seconds on two cores."""

    workload: Workload = "stall"
    num_streams: int = 8
    """Decoders (``stall``), or the short requests behind the long one (``head-of-line``)."""
    prompt_tokens: int = 512
    """Length of the long prompt."""
    stream_prompt_tokens: int = 16
    max_tokens: int = 32
    """Output tokens of each decoder; the most of any request of a trace."""
    num_requests: int = 16
    """Requests of ``conversation``, ``code``, ``agent``, ``churn`` and ``pressure``."""
    length_divisor: int = 16
    """Lengths of a trace are divided by this; their order and ratios stay."""
    arrivals: Arrivals = "poisson"
    rate_per_s: float = 8.0
    """Mean arrivals per second; also of ``trace``, whose gaps are stretched to it."""
    cancel_share: float = 0.3
    """Share of the requests of ``churn`` whose client goes away in the middle."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, values in (("workload", get_args(Workload)), ("arrivals", get_args(Arrivals))):
            if getattr(self, name) not in values:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(values)}")
        for name in (
            "num_streams", "prompt_tokens", "stream_prompt_tokens", "max_tokens", "num_requests", "length_divisor"
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.rate_per_s <= 0 or not 0 <= self.cancel_share <= 1:
            raise ConfigError(
                f"rate_per_s is {self.rate_per_s} and cancel_share is {self.cancel_share}; "
                "they must be above 0 and from 0 to 1"
            )
        if self.workload == "stall" and self.max_tokens <= LEAD_IN_TOKENS:
            raise ConfigError(
                f"max_tokens is {self.max_tokens} but the long prompt arrives after {LEAD_IN_TOKENS} tokens of each "
                f"decoder; raise it to at least {LEAD_IN_TOKENS + 1}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One greedy request of a load."""

    request_id: str
    role: Role
    num_prompt_tokens: int
    max_tokens: int
    arrival_s: float = 0.0
    """From the start of the run."""
    lead_in_tokens: int = 0
    """If not 0: arrives once each decoder has so many tokens (or has ended), whatever ``arrival_s`` is."""
    cancel_after_tokens: int | None = None
    """The client closes the stream after so many tokens."""


def make_calls(settings: LoadSettings) -> tuple[Call, ...]:
    """Return the calls of a load in the order of arrival; the same for the same settings."""
    if settings.workload == "stall":
        return _stall(settings)
    if settings.workload == "head-of-line":
        return _head_of_line(settings)
    calls = _traced(settings)
    if settings.workload == "pressure":  # all at once: spread out they would hardly meet in the pool
        return tuple(replace(c, arrival_s=0.0) for c in calls)
    return _with_cancels(calls, settings) if settings.workload == "churn" else calls


def _stall(settings: LoadSettings) -> tuple[Call, ...]:
    long = Call(
        request_id="long",
        role="long",
        num_prompt_tokens=settings.prompt_tokens,
        max_tokens=8,
        lead_in_tokens=LEAD_IN_TOKENS,
    )
    return (*_short(settings, 0.0), long)


def _head_of_line(settings: LoadSettings) -> tuple[Call, ...]:
    """The short ones arrive 10 ms later, so that the long one is first in every queue."""
    long = Call(request_id="long", role="long", num_prompt_tokens=settings.prompt_tokens, max_tokens=8)
    return (long, *_short(settings, 0.01))


def _short(settings: LoadSettings, arrival_s: float) -> tuple[Call, ...]:
    return tuple(
        Call(
            request_id=f"stream-{i}",
            role="decoder",
            num_prompt_tokens=settings.stream_prompt_tokens,
            max_tokens=settings.max_tokens,
            arrival_s=arrival_s,
        )
        for i in range(settings.num_streams)
    )


def _traced(settings: LoadSettings) -> tuple[Call, ...]:
    """A prompt in the longest tenth of the load counts as long."""
    name = settings.workload if settings.workload in ("conversation", "code", "agent") else "conversation"
    rows = read_trace(name)[: settings.num_requests]
    if len(rows) < settings.num_requests:
        raise ConfigError(f"num_requests is {settings.num_requests} but the trace {name} has {len(rows)}; lower it")
    lengths = [max(2, n // settings.length_divisor) for _, n, _ in rows]
    long_tokens = float(np.percentile(lengths, 90))
    times = arrival_times([ms / 1e3 for ms, _, _ in rows], settings)
    return tuple(
        Call(
            request_id=f"{name}-{i}",
            role="long" if length >= long_tokens else "decoder",
            num_prompt_tokens=length,
            max_tokens=min(settings.max_tokens, max(1, num_output)),
            arrival_s=at,
        )
        for i, (length, at, (_, _, num_output)) in enumerate(zip(lengths, times, rows, strict=True))
    )


def read_trace(name: str) -> tuple[tuple[int, int, int], ...]:
    """Return arrival (ms), prompt tokens and output tokens of each row of a trace that comes with the package."""
    data = resources.files("moesaic.bench").joinpath("traces", f"{name}.csv.gz").read_bytes()
    rows = csv.reader(io.StringIO(gzip.decompress(data).decode()))
    next(rows)
    return tuple((int(at), int(n), int(m)) for at, n, m in rows)


def arrival_times(traced_s: SequenceOf[float], settings: LoadSettings) -> tuple[float, ...]:
    """Return one arrival per entry of ``traced_s``, from 0 on, in seconds."""
    count = len(traced_s)
    if settings.arrivals == "trace":
        span_s = traced_s[-1] - traced_s[0]
        scale = (count - 1) / settings.rate_per_s / span_s if span_s else 0.0
        return tuple((at - traced_s[0]) * scale for at in traced_s)
    size = BURST_SIZE if settings.arrivals == "bursty" else 1
    gaps = np.random.default_rng(settings.seed).exponential(size / settings.rate_per_s, size=-(-count // size))
    starts = np.cumsum(gaps) - gaps[0]
    return tuple(float(starts[i // size]) for i in range(count))


def _with_cancels(calls: SequenceOf[Call], settings: LoadSettings) -> tuple[Call, ...]:
    rng = np.random.default_rng(settings.seed)
    chosen = set(rng.choice(len(calls), size=round(settings.cancel_share * len(calls)), replace=False).tolist())
    return tuple(
        replace(c, cancel_after_tokens=max(1, c.max_tokens // 2)) if i in chosen else c for i, c in enumerate(calls)
    )


def id_prompts(calls: Iterable[Call], vocab_size: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Return a prompt of random ids per call; the first two ids are the call's own number, so no prefix is shared.

    Nor is either of the two alone: with random weights, rows that have it in common choose the same experts more often
    (Qwen3-30B-A3B on an H200, 32 rows: 11.6 ms a step instead of 14.9).
    """
    rng = np.random.default_rng(seed)
    return tuple(
        (
            i % vocab_size,
            (i // vocab_size + 7919 * i) % vocab_size,
            *rng.integers(0, vocab_size, size=c.num_prompt_tokens).tolist(),
        )[: max(2, c.num_prompt_tokens)]
        for i, c in enumerate(calls)
    )


def text_prompts(calls: Iterable[Call], text: str, count: Callable[[str], int], seed: int) -> tuple[str, ...]:
    """Return a prompt of real text per call: words of ``text`` from a drawn place on, behind the call's number.

    Shapes: about ``num_prompt_tokens`` tokens each by ``count``, as words are not cut.
    """
    words = text.split()
    tokens_per_word = count(" ".join(words)) / len(words)
    rng = np.random.default_rng(seed)
    prompts = []
    for i, call in enumerate(calls):
        start = int(rng.integers(len(words)))
        num_words = max(1, int((call.num_prompt_tokens - count(f"{i}.")) / tokens_per_word))
        prompts.append(f"{i}. " + " ".join(words[(start + k) % len(words)] for k in range(num_words)))
    return tuple(prompts)
