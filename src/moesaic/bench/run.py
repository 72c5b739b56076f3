"""Benchmarks one after the other: progress, table, and the file with every sample."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from rich.console import Console

from moesaic.bench.progress import StageProgress
from moesaic.bench.report import Report, show, write_json

Bench = Callable[[Callable[[str, float], None]], Report]
"""Runs one benchmark, telling its progress."""


def run_benches(
    benches: Iterable[Bench], console: Console, *, num_threads: int | None = None, json_file: Path | None = None
) -> list[Report]:
    """Run and print each of ``benches`` and return their reports; the file is written after each of them.

    ``num_threads`` stays set for PyTorch in this process; None leaves PyTorch's own choice.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    reports: list[Report] = []
    for bench in benches:
        with StageProgress(console) as progress:
            reports.append(bench(progress))
        show(reports[-1], console)
        if json_file is not None:
            write_json(json_file, reports)
    return reports
