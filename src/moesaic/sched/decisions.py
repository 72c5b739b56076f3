"""The decision log: what a scheduler was told and what it planned, one JSON line each. No text, no token ids."""

import contextlib
import json
import logging
import weakref
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, fields
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from moesaic.config import EngineConfig
from moesaic.errors import ConfigError
from moesaic.sched.plan import StepPlan
from moesaic.sched.swap import SwapTransfer
from moesaic.sequence import SeqId, Sequence

logger = logging.getLogger(__name__)

FORMAT = "moesaic decisions"
VERSION = 2
_BUFFER_BYTES = 1 << 16
_SETTINGS = (
    "enable_chunked_prefill",
    "prefill_chunk_size",
    "prefill_starvation_threshold_steps",
    "max_partial_prefills",
    "max_tokens_per_step",
    "max_batch_size",
    "scheduling_policy",
    "priority_aging_steps",
    "max_waiting_requests",
    "block_size",
)
"""The fields of ``EngineConfig`` that scheduling depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line of a log: all that a scheduler is made from."""

    settings: dict[str, Any]
    """Fields of ``EngineConfig`` (Any: each of its own type)."""
    num_blocks: int
    max_model_len: int
    num_swap_blocks: int

    @classmethod
    def of(cls, config: EngineConfig, num_blocks: int, max_model_len: int, num_swap_blocks: int) -> "Header":
        """Return the header for a scheduler of ``config``."""
        settings = {name: getattr(config, name) for name in _SETTINGS}
        return cls(
            settings=settings, num_blocks=num_blocks, max_model_len=max_model_len, num_swap_blocks=num_swap_blocks
        )

    @classmethod
    def parse(cls, entry: Any) -> "Header":  # Any: whatever the first line of a file holds
        """Return the header that ``entry`` is.

        Raises: ``ConfigError`` if it is none, or one of another version.
        """
        if not isinstance(entry, dict) or entry.get("format") != FORMAT:
            raise ConfigError("the first line is no header of a decision log; pass a file made with --decision-log")
        if entry.get("version") != VERSION:
            raise ConfigError(
                f"the log has version {entry.get('version')} but this Moesaic reads version {VERSION}; "
                "replay it with the Moesaic that wrote it"
            )
        wanted, found = {f.name for f in fields(cls)}, entry.keys() - {"format", "version"}
        if wanted != found or not isinstance(entry["settings"], dict) or entry["settings"].keys() != set(_SETTINGS):
            raise ConfigError("the header has other settings than this version has; record the log again")
        return cls(**{name: entry[name] for name in wanted})

    def as_entry(self) -> dict[str, Any]:
        """Return what stands in the first line (Any: JSON values)."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}


class DecisionLog:
    """Writes decisions to a file, buffered; sequences are named by their number in the order of arrival.

    A write that fails ends the log with one logged error, and never the step. The file is complete once the log is
    closed, garbage collected, or the process exits; a step that failed is written out at once.

    The lines are described in ``docs/memory.md``.
    """

    def __init__(self, path: Path, header: Header) -> None:
        """Open ``path``, replacing a file that is there.

        Raises: ``ConfigError`` if it cannot be written.
        """
        self.path = path
        self._last_decode: list[SeqId] | None = None
        file = _opened(path, header)
        self._file: TextIOWrapper | None = file
        self._finalizer = weakref.finalize(self, _close, file)

    @property
    def is_open(self) -> bool:
        """False once the log is closed or a write has failed."""
        return self._file is not None

    def add(self, seq: Sequence, leader_id: SeqId | None) -> None:
        """Write that a request was taken, and whose sibling it is."""
        self._write("add", seq.seq_id, seq.num_prompt_tokens, seq.max_tokens, seq.request.priority, leader_id)

    def command(self, verb: str, seq_id: SeqId) -> None:
        """Write a command about one request that took effect."""
        self._write(verb, seq_id)

    def step(self, step_id: int, max_tokens: int, plan: StepPlan) -> None:
        """Write the plan of a step that could have ``max_tokens``."""
        decode = [row.seq_id for row in plan.decode_rows]
        chunks = [(c.seq_id, c.start, c.num_tokens) for c in plan.chunks]
        self._write("step", step_id, max_tokens, None if decode == self._last_decode else decode, chunks)
        self._last_decode = decode

    def advance(self, step_id: int) -> None:
        """Write that a step's progress moved before its tokens were known."""
        self._write("advance", step_id)

    def commit(self, step_id: int, finished: Iterable[tuple[SeqId, str]]) -> None:
        """Write that a step was committed, and which of its rows finished and why."""
        self._write("commit", step_id, list(finished))

    def times(self, step_id: int, start_s: float, phases_s: SequenceOf[float]) -> None:
        """Write when a committed step began, in seconds, and how long planning, forward and commit took."""
        self._write("times", step_id, *(round(s, 6) for s in (start_s, *phases_s)))

    def rollback(self, step_id: int, is_failure: bool) -> None:
        """Write that a step was rolled back; a failure is flushed, since worse may follow."""
        self._write("rollback", step_id)
        if is_failure:
            self.flush()

    def swap_in(self, seq_ids: Iterable[SeqId]) -> None:
        """Write which swapped sequences were given blocks."""
        self._write("swap_in", list(seq_ids))

    def swap_begin(self, transfers: Iterable[SwapTransfer]) -> None:
        """Write which copies begin."""
        self._write("swap_begin", [(t.transfer_id, t.seq_id, t.direction) for t in transfers])

    def swap_over(self, transfer: SwapTransfer, *, is_failure: bool) -> None:
        """Write how a copy ended."""
        self._write("swap_fail" if is_failure else "swap_end", transfer.transfer_id)

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(self._file, error)

    def close(self) -> None:
        """Write what is buffered and close the file; idempotent."""
        self._file = None
        self._finalizer()

    def _write(self, *entry: Any) -> None:  # Any: JSON values
        if self._file is not None:
            try:
                self._file.write(_line(entry))
            except OSError as error:
                self._give_up(self._file, error)

    def _give_up(self, file: TextIOWrapper, error: OSError) -> None:
        logger.error("decision log ended: path=%s error=%s", self.path, error)
        self._file = None
        self._finalizer.detach()
        _close_silently(file)


def _opened(path: Path, header: Header) -> TextIOWrapper:
    """Return the file with its header written; a full disk shows here."""
    with contextlib.ExitStack() as stack:
        try:
            file = open(path, "w", buffering=_BUFFER_BYTES, encoding="ascii")  # noqa: SIM115  # stays open
            stack.callback(_close_silently, file)
            file.write(_line(header.as_entry()))
            file.flush()
        except OSError as error:
            raise ConfigError(
                f"decision log {str(path)!r} cannot be written ({error.strerror}); pass another file to --decision-log"
            ) from error
        stack.pop_all()
    return file


def _line(entry: Any) -> str:
    return json.dumps(entry, separators=(",", ":")) + "\n"


def _close(file: TextIOWrapper) -> None:
    """Close ``file``, also at exit, where an exception would only be noise."""
    try:
        file.close()
    except OSError as error:
        logger.error("decision log is incomplete: path=%s error=%s", file.name, error)


def _close_silently(file: TextIOWrapper) -> None:
    """Close a file whose failure is told already: closing tries once more to write what is buffered."""
    with contextlib.suppress(OSError):
        file.close()
