"""What a client saw of each request, and the file that keeps it: JSON lines, the settings first."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from moesaic.errors import ConfigError

FORMAT = "moesaic bench events"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEvents:
    """One request as its client saw it; seconds are from the start of the run."""

    request_id: str
    role: str
    arrival_s: float
    chunks: tuple[tuple[float, int], ...]
    """When a part of the stream came and how many output tokens it had."""
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    """None if the server does not tell them."""
    num_prompt_tokens: int
    is_cancelled: bool = False
    """The client went away on purpose."""
    error: str | None = None

    @property
    def token_s(self) -> tuple[float, ...]:
        """One time per token; tokens of one part came together."""
        return tuple(at for at, n in self.chunks for _ in range(n))

    @property
    def ttft_s(self) -> float | None:
        times = self.token_s
        return times[0] - self.arrival_s if times else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        return tuple(after - before for before, after in pairwise(self.token_s))

    @property
    def tpot_s(self) -> float | None:
        times = self.token_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def stall_s(self) -> float | None:
        return max(self.itl_s, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRun:
    """One run of the load on one arm."""

    pair: int
    arm: str
    requests: tuple[RequestEvents, ...]
    duration_s: float
    load_average: tuple[float, ...] = ()
    """Of the machine when the run began: its company."""
    peak_kv_blocks: int | None = None
    num_kv_blocks: int | None = None
    expert_bytes: dict[str, int] = field(default_factory=dict)
    """What the server counts about experts in bytes, by its own names."""

    @property
    def num_tokens(self) -> int:
        return sum(len(r.token_s) for r in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumn:
    """One step of a server: who had tokens in it and how many KV blocks were held after it."""

    decode_rows: int
    chunks: tuple[tuple[str, int], ...]
    """Request and prompt tokens."""
    kv_blocks: int
    times_s: tuple[float, float, float, float] | None = None
    """When it began on the server's clock, and how long planning, forward with sampling, and commit took.

    None in files from before they were recorded.
    """

    @property
    def duration_s(self) -> float | None:
        return None if self.times_s is None else sum(self.times_s[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """All of one comparison (Any: JSON values)."""

    settings: dict[str, Any]
    environment: dict[str, Any]
    runs: tuple[ArmRun, ...]
    steps: dict[str, tuple[StepColumn, ...]] = field(default_factory=dict)
    """Of the last run of each arm that is our own server."""

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.arm for run in self.runs))

    def of(self, arm: str) -> tuple[ArmRun, ...]:
        return tuple(run for run in self.runs if run.arm == arm)


def write_events(path: Path, recording: Recording) -> None:
    """Write ``recording`` to ``path``; a folder that does not exist is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "settings": recording.settings,
        "environment": recording.environment,
    }
    lines: list[dict[str, Any]] = [head]
    for run in recording.runs:
        entry = asdict(run)
        requests = entry.pop("requests")
        lines.append({"run": entry})
        lines += [{"request": request} for request in requests]
    lines += [{"steps": {"arm": arm, "columns": [asdict(c) for c in cs]}} for arm, cs in recording.steps.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read_events(path: Path) -> Recording:
    """Return what ``write_events`` wrote.

    Raises: ``ConfigError`` if the file cannot be read or is of another kind or version.
    """
    try:
        head, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path} ({error}); pass a file that moesaic bench paired wrote") from error
    if not isinstance(head, dict) or (head.get("format"), head.get("version")) != (FORMAT, VERSION):
        raise ConfigError(f"{path} has no events of version {VERSION}; pass the .jsonl of moesaic bench paired")
    runs: list[tuple[dict[str, Any], list[RequestEvents]]] = []
    steps = {}
    for line in lines:
        if "run" in line:
            runs.append((line["run"], []))
        elif "request" in line:
            runs[-1][1].append(_made(RequestEvents, line["request"]))
        else:
            steps[line["steps"]["arm"]] = tuple(_made(StepColumn, c) for c in line["steps"]["columns"])
    return Recording(
        settings=head["settings"],
        environment=head["environment"],
        runs=tuple(_made(ArmRun, {**run, "requests": requests}) for run, requests in runs),
        steps=steps,
    )


T = TypeVar("T")


def _made(kind: type[T], entry: dict[str, Any]) -> T:
    """Return a value of JSON with its lists as tuples."""
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]  # always one of our dataclasses
    return kind(**{name: _tuples(value) for name, value in entry.items() if name in known})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def percentile(values: Iterable[float], share: float) -> float:
    """Return the least value that at least ``share`` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = max(0, -int(-share * len(ordered) // 1) - 1)
    return ordered[rank]
