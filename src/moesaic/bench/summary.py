"""The tables of a recording, for a terminal and as JSON."""

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from moesaic.bench.comparison import pair_of
from moesaic.bench.events import Recording
from moesaic.bench.figures import (
    METRICS,
    ROLES,
    Bounds,
    Distribution,
    difference,
    goodput,
    parity,
    tokens_per_s,
    values,
)
from moesaic.bench.paired import Spread
from moesaic.errors import ConfigError

HEAD = ("ms", "arm", "p50", "p90", "p99", "max", "n")


def bounds(recording: Recording) -> Bounds:
    """Return the bounds of goodput that the run was given.

    Raises: ``ConfigError`` if it was given none: ``moesaic bench engine`` compares no arms.
    """
    if not {"max_ttft_s", "max_stall_s"} <= recording.settings.keys():
        raise ConfigError(
            "these events are of no comparison; pass the .jsonl of moesaic bench paired "
            "(the figures of moesaic bench engine are in the .json beside its events)"
        )
    return Bounds(ttft_s=recording.settings["max_ttft_s"], stall_s=recording.settings["max_stall_s"])


def distribution_rows(recording: Recording, role: str) -> list[tuple[str, ...]]:
    """Return metric, arm, percentiles in ms and n; metrics without a value are left out."""
    rows = []
    for metric, title in METRICS.items():
        for arm in recording.arms:
            found = Distribution.of(values(recording.of(arm), role, metric))
            if found:
                cells = [f"{1e3 * v:.1f}" for v in (found.p50, found.p90, found.p99, found.max)]
                rows.append((title, arm, *cells, str(found.n)))
    return rows


def difference_rows(recording: Recording) -> list[tuple[str, ...]]:
    """Return candidate - baseline in ms by role, metric and percentile: the median pair and the range of pairs."""
    baseline, *candidates = recording.arms
    rows = []
    for candidate in candidates:
        two = pair_of(recording, baseline, candidate)
        for role, role_title in ROLES.items():
            for metric, title in METRICS.items():
                gaps = [difference(two, role, metric, name) for name in ("p50", "p99", "max")]
                if any(gaps):
                    cells = ["-" if g is None else _in_ms(g) for g in gaps]
                    rows.append((f"{role_title}: {title}", candidate, *cells))
    return rows


def _in_ms(spread: Spread) -> str:
    return Spread.of([1e3 * spread.low, 1e3 * spread.median, 1e3 * spread.high]).text(1) if spread.n > 1 else (
        f"{1e3 * spread.median:.1f}"
    )  # fmt: skip


def run_rows(recording: Recording) -> list[tuple[str, ...]]:
    """Return per arm what belongs to whole runs."""
    rows: list[tuple[str, ...]] = []
    for arm in recording.arms:
        runs = recording.of(arm)
        requests = [r for run in runs for r in run.requests]
        peaks = [run.peak_kv_blocks for run in runs if run.peak_kv_blocks is not None]
        experts = {name: n for run in runs for name, n in run.expert_bytes.items()}
        rows.append(
            (
                arm,
                Spread.of(map(tokens_per_s, runs)).text(1),
                Spread.of(goodput(run, bounds(recording)) for run in runs).text(2),
                str(sum(r.error is not None for r in requests)),
                str(sum(r.is_cancelled for r in requests)),
                f"{max(peaks)} of {runs[0].num_kv_blocks}" if peaks else "not told",
                ", ".join(f"{name} {n}" for name, n in experts.items()) or "not told",
            )
        )
    return rows


RUN_HEAD = ("arm", "tokens/s", "good requests/s", "errors", "cancelled", "peak KV blocks", "expert bytes")


def parity_of(recording: Recording) -> dict[str, dict[str, Any]]:
    """Return for each candidate whether its greedy outputs are the baseline's, and of how many (Any: JSON values)."""
    baseline, *candidates = recording.arms
    found = {name: parity(pair_of(recording, baseline, name)) for name in candidates}
    return {name: {"parity": p.is_equal, **asdict(p)} for name, p in found.items()}


def as_json(recording: Recording) -> dict[str, Any]:
    """Return settings, machine and every figure; seconds, unrounded (Any: JSON values)."""
    by_candidate = parity_of(recording)
    return {
        "settings": recording.settings,
        "environment": recording.environment,
        "parity": all(p["parity"] for p in by_candidate.values()),
        "parity_by_candidate": by_candidate,
        "arms": {arm: _arm_json(recording, arm) for arm in recording.arms},
        "differences_ms": [
            dict(zip(("what", "candidate", "p50", "p99", "max"), row, strict=True))
            for row in difference_rows(recording)
        ],
        "raw": [asdict(run) for run in recording.runs],
    }


def _arm_json(recording: Recording, arm: str) -> dict[str, Any]:
    runs = recording.of(arm)
    roles: dict[str, Any] = {
        role: {
            metric: asdict(found)
            for metric in METRICS
            if (found := Distribution.of(values(runs, role, metric))) is not None
        }
        for role in ROLES
    }
    return {
        **roles,
        "tokens_per_s": [tokens_per_s(run) for run in runs],
        "goodput_per_s": [goodput(run, bounds(recording)) for run in runs],
        "num_errors": sum(r.error is not None for run in runs for r in run.requests),
    }


def remarks(recording: Recording) -> list[str]:
    """Return the sentences that belong beside every table."""
    where, told = recording.environment, recording.settings
    loads = [run.load_average[0] for run in recording.runs if run.load_average]
    texts = [
        f"Workload {told['load']['workload']}, seed {told['load']['seed']}, n = {told['num_pairs']} rounds in turns; "
        f"prompts: {told['prompts']}. {where['cpu']}, {where['num_cpus']} CPUs; moesaic {where['moesaic']}, "
        f"torch {where['torch']}, transformers {where['transformers']}; {where['date']}.",
        f"Load average when runs began: {min(loads):.1f} to {max(loads):.1f}." if loads else "Load average not known.",
        f"Good: first token within {told['max_ttft_s']} s, no gap above {told['max_stall_s']} s.",
    ]
    texts += [
        f"Outputs equal, {recording.arms[0]} and {name}: {p['num_equal']} of {p['num_compared']}."
        for name, p in parity_of(recording).items()
    ]
    errors = [r.error for run in recording.runs for r in run.requests if r.error]
    return texts + ([f"First error: {errors[0]}"] if errors else [])


def show_summary(recording: Recording, console: Console) -> None:
    """Print the tables and what belongs beside them.

    Raises: ``ConfigError`` if it is no comparison, before anything is printed.
    """
    runs = run_rows(recording)
    for role, title in ROLES.items():
        if rows := distribution_rows(recording, role):
            _print(console, title, HEAD, rows)
    if rows := difference_rows(recording):
        title = f"candidate - {recording.arms[0]}, ms: median (range) over pairs"
        _print(console, title, ("", "candidate", "p50", "p99", "max"), rows)
    _print(console, "runs: median (range)", RUN_HEAD, runs)
    for remark in remarks(recording):
        console.print(remark, markup=False, highlight=False)


def _print(console: Console, title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    console.print(f"\n{title}", markup=False, highlight=False)
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII)
    for i, column in enumerate(head):
        table.add_column(column, justify="left" if i < 2 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
