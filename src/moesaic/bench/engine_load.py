"""The loads that one engine is measured with; an engine sees the same requests under every configuration."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from moesaic.bench.load import Call, Role
from moesaic.errors import ConfigError

EngineLoad = Literal["decode", "stall", "offline"]
LEAD_IN_TOKENS = 20
"""Output tokens of each stream before the first long prompt arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoads:
    """The loads. The defaults are those of ``docs/benchmarks/h200-2026-12-01.md``; they are for a large GPU."""

    loads: tuple[str, ...] = get_args(EngineLoad)
    decode_rows: tuple[int, ...] = (1, 8, 32, 128)
    decode_prompt_tokens: int = 512
    decode_max_tokens: int = 256
    num_streams: int = 32
    stream_prompt_tokens: int = 256
    stream_max_tokens: int = 1536
    num_long: int = 6
    long_prompt_tokens: int = 16384
    long_max_tokens: int = 16
    long_gap_s: float = 1.5
    """Between the arrivals of two long prompts."""
    num_offline: int = 256
    offline_prompt_tokens: int = 1024
    offline_max_tokens: int = 128
    length_divisor: int = 1
    """Divides every length above (not the lead-in)."""
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.loads if name not in get_args(EngineLoad)]
        if unknown or not self.loads:
            choices = ", ".join(get_args(EngineLoad))
            raise ConfigError(f"workloads are {', '.join(self.loads) or 'none'}; choose of {choices}")
        for name in ("num_streams", "num_long", "num_offline", "length_divisor"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.decode_rows or min(self.decode_rows) < 1 or self.long_gap_s < 0:
            raise ConfigError(
                f"decode_rows are {self.decode_rows} and long_gap_s is {self.long_gap_s}; "
                "there must be rows, each at least 1, and the gap must not be negative"
            )
        if "stall" in self.loads and self.length(self.stream_max_tokens) <= LEAD_IN_TOKENS:
            raise ConfigError(
                f"length_divisor is {self.length_divisor}: streams of {self.length(self.stream_max_tokens)} tokens end "
                f"before a long prompt arrives, after {LEAD_IN_TOKENS}; lower --length-divisor"
            )

    def length(self, num_tokens: int) -> int:
        """Return a length of these settings divided, at least 2."""
        return max(2, num_tokens // self.length_divisor)

    def calls(self, role: Role, count: int, num_prompt_tokens: int, max_tokens: int) -> tuple[Call, ...]:
        """Return ``count`` requests that arrive at once; lengths are divided here."""
        return tuple(
            Call(
                request_id=f"{role}-{i}",
                role=role,
                num_prompt_tokens=self.length(num_prompt_tokens),
                max_tokens=self.length(max_tokens),
            )
            for i in range(count)
        )

    def decode_calls(self, num_rows: int) -> tuple[Call, ...]:
        return self.calls("decoder", num_rows, self.decode_prompt_tokens, self.decode_max_tokens)

    def long_calls(self) -> tuple[Call, ...]:
        calls = self.calls("long", self.num_long, self.long_prompt_tokens, self.long_max_tokens)
        return tuple(
            replace(c, arrival_s=i * self.long_gap_s, lead_in_tokens=LEAD_IN_TOKENS) for i, c in enumerate(calls)
        )

    def stall_calls(self) -> tuple[Call, ...]:
        streams = self.calls("decoder", self.num_streams, self.stream_prompt_tokens, self.stream_max_tokens)
        return (*streams, *self.long_calls())

    def offline_calls(self) -> tuple[Call, ...]:
        return self.calls("decoder", self.num_offline, self.offline_prompt_tokens, self.offline_max_tokens)

    def all_calls(self) -> Iterator[tuple[EngineLoad, str, tuple[Call, ...]]]:
        """Yield the kind, the name and the requests of each load that is asked for."""
        if "decode" in self.loads:
            for num_rows in self.decode_rows:
                yield "decode", f"decode, rows {num_rows}", self.decode_calls(num_rows)
        if "stall" in self.loads:
            yield "stall", "stall", self.stall_calls()
        if "offline" in self.loads:
            yield "offline", "offline", self.offline_calls()
