"""What each step of a server held, from its decision log."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moesaic.bench.events import StepColumn
from moesaic.errors import ConfigError
from moesaic.kv.geometry import blocks_for_tokens
from moesaic.sched.decisions import FORMAT, Header


def read_steps(path: Path, request_ids: tuple[str, ...]) -> tuple[StepColumn, ...]:
    """Return the steps of the last requests of a log, as many as ``request_ids``, which name them in their order.

    KV blocks are those that the computed tokens fill; a swapped request holds none.
    Raises: ``ConfigError`` if the first line is no header.
    """
    head, *entries = _lines(path)
    block_size = Header.parse(head).settings["block_size"]
    added = [entry[1] for entry in entries if entry[0] == "add"]
    names = dict(zip(added[-len(request_ids) :], request_ids, strict=False))
    return tuple(_columns(entries, names, block_size))


def read_all_steps(path: Path) -> tuple[StepColumn, ...]:
    """Return every step of a log; requests are named by their number in the order of arrival.

    Raises: ``ConfigError`` if the first line is no header.
    """
    head, *entries = _lines(path)
    names = {entry[1]: f"request {entry[1]}" for entry in entries if entry[0] == "add"}
    return tuple(_columns(entries, names, Header.parse(head).settings["block_size"]))


def is_decision_log(path: Path) -> bool:
    """Return whether the file begins as a decision log does. Raises: ``ConfigError`` if it cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            return f'"{FORMAT}"' in file.readline(1000)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} ({error}); check the path") from error


def _times(entries: list[Any]) -> dict[int, tuple[float, float, float, float]]:
    found = (entry[1:] for entry in entries if entry[0] == "times")
    return {step: (start, plan, launch, commit) for step, start, plan, launch, commit in found}


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _columns(entries: list[Any], names: dict[Any, str], block_size: int) -> Iterator[StepColumn]:
    held: dict[Any, int] = {}  # computed tokens on the device, by sequence
    swapped: dict[Any, int] = {}
    transfers: dict[Any, tuple[Any, str]] = {}
    decode: list[Any] = []
    chunks: list[Any] = []
    preempted, times = _preempted(entries), _times(entries)
    for i, (verb, *rest) in enumerate(entries):
        match verb:
            case "abort" | "fail" | "preempt":
                held.pop(rest[0], None)
            case "step":
                decode, chunks = decode if rest[2] is None else rest[2], rest[3]
            case "commit":
                held.update({seq: held.get(seq, 0) + 1 for seq in decode})
                held.update({seq: start + num for seq, start, num in chunks})
                rows = [seq for seq in decode if seq in names]
                parts = tuple((names[seq], num) for seq, _, num in chunks if seq in names)
                if rows or parts:
                    blocks = sum(blocks_for_tokens(n, block_size) for n in held.values())
                    seconds = times.get(rest[0])
                    yield StepColumn(decode_rows=len(rows), chunks=parts, kv_blocks=blocks, times_s=seconds)
                for seq in [*(seq for seq, _ in rest[1]), *preempted.get(i, ())]:
                    held.pop(seq, None)
            case "swap_begin":
                transfers.update({transfer: (seq, direction) for transfer, seq, direction in rest[0]})
            case "swap_end":
                seq, direction = transfers.pop(rest[0])
                if direction == "out":
                    swapped[seq] = held.pop(seq, 0)
                else:
                    held[seq] = swapped.pop(seq, 0)
            case _:
                pass


def _preempted(entries: list[Any]) -> dict[int, list[Any]]:
    """Return the commits behind which sequences lost their blocks, by index.

    The log leaves out what planning itself preempts; it shows where a sequence later starts behind what it had.
    """
    held: dict[Any, int] = {}
    last_commit: dict[Any, int] = {}
    found: dict[int, list[Any]] = {}
    decode: list[Any] = []
    chunks: list[Any] = []
    for i, (verb, *rest) in enumerate(entries):
        if verb == "step":
            decode, chunks = decode if rest[2] is None else rest[2], rest[3]
            for seq, start, _ in chunks:
                if start < held.get(seq, 0):
                    found.setdefault(last_commit[seq], []).append(seq)
        elif verb == "commit":
            ends = {**{seq: held.get(seq, 0) + 1 for seq in decode}, **{seq: a + n for seq, a, n in chunks}}
            held.update(ends)
            last_commit.update(dict.fromkeys(ends, i))
    return found
