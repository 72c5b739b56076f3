"""What a benchmark found: a small table for people, everything for a file."""

import contextlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import moesaic


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One benchmark's settings, table and raw samples (Any: JSON values)."""

    name: str
    settings: dict[str, Any]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()
    """Sentences below the table."""
    samples: tuple[dict[str, Any], ...]
    """Every measurement, in the order of measuring."""
    environment: dict[str, Any] = field(default_factory=lambda: environment())


def environment() -> dict[str, Any]:
    """Return where and with what was measured (Any: JSON values)."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "num_cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "num_threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "moesaic": moesaic.__version__,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        **_gpu(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _gpu() -> dict[str, Any]:
    """Return the card and what drives it (Any: JSON values); nothing without one."""
    if not torch.cuda.is_available():
        return {}
    found = {"gpu": torch.cuda.get_device_name(), "num_gpus": torch.cuda.device_count(), "cuda": torch.version.cuda}
    for package in ("triton", "flashinfer-python"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def cpu_name() -> str:
    """Return the name that the processor gives itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def show(report: Report, console: Console) -> None:
    """Print a report in at most the width of ``console``."""
    where = report.environment
    console.print(f"\n{report.name}: {_pairs(report.settings)}", highlight=False, soft_wrap=False)
    if "gpu" in where:
        console.print(f"{where['gpu']}, CUDA {where['cuda']}", highlight=False)
    console.print(
        f"{where['cpu']}, threads {where['num_threads']} of {where['num_cpus']}, "
        f"load {where['load_average'][0]:.1f}, torch {where['torch']}, transformers {where['transformers']}",
        highlight=False,
    )
    table = Table(box=box.ASCII if not console.is_terminal else box.SIMPLE_HEAD)
    for i, column in enumerate(report.columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in report.rows:
        table.add_row(*row)
    console.print(table)
    for remark in report.remarks:
        console.print(remark, highlight=False)


def _pairs(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def write_json(path: Path, reports: Iterable[Report]) -> None:
    """Write reports to ``path`` as a JSON list; a folder that does not exist is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(r) for r in reports], indent=1) + "\n", encoding="utf-8")
