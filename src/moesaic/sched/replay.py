"""Replays a decision log on a real scheduler, without any model, and finds the first decision that differs."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.config import EngineConfig
from moesaic.errors import ConfigError, MoesaicError
from moesaic.request import Request, SamplingParams
from moesaic.sched.decisions import Header
from moesaic.sched.factory import make_scheduler
from moesaic.sched.recording import finished_rows
from moesaic.sched.swap import SwapTransfer
from moesaic.sched.transaction import StepTransaction
from moesaic.sequence import SeqId

_TOKEN, _STOP = 0, 1
"""The two tokens of a replay: one that goes on and one that every request stops at."""
_CUT_OFF = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What a replay found."""

    num_commands: int
    """Decisions replayed that are not steps or their ends."""
    num_steps: int
    first_difference: str | None
    """Line, step, what the log has and what the scheduler did; None if all agree. Nothing behind it was replayed."""
    is_truncated: bool = False
    """The last line is cut off, as a crash leaves it; the lines before it were replayed."""


def replay(path: Path) -> ReplayResult:
    """Return the result of replaying the log in ``path``.

    Raises: ``ConfigError`` if it cannot be read, is no log of this version, or a line in its middle is damaged.
    """
    lines = _lines(path)
    _, first = next(lines, (1, None))
    player = _Player(Header.parse(first))
    num_commands = num_steps = 0
    for number, entry in lines:
        if entry is _CUT_OFF:
            return ReplayResult(
                num_commands=num_commands, num_steps=num_steps, first_difference=None, is_truncated=True
            )
        difference = player.difference(number, entry)
        if difference is not None:
            return ReplayResult(num_commands=num_commands, num_steps=num_steps, first_difference=difference)
        num_steps += entry[0] == "step"
        num_commands += entry[0] not in ("step", "advance", "commit", "rollback", "times")
    return ReplayResult(num_commands=num_commands, num_steps=num_steps, first_difference=None)


def _lines(path: Path) -> Iterator[tuple[int, Any]]:  # Any: JSON values
    """Yield number and value of each line; the value of a last line that is cut off is ``_CUT_OFF``."""
    try:
        with open(path, encoding="ascii") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield number, json.loads(line)
                except json.JSONDecodeError as error:
                    if line.endswith("\n"):
                        raise ConfigError(f"line {number} of {path} is damaged ({error}); record it again") from error
                    yield number, _CUT_OFF
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a decision log ({error}); check the path") from error


class _Player:
    """A scheduler made from a header, told what the log says; requests are named by their sequence ids."""

    def __init__(self, header: Header) -> None:
        self._scheduler = make_scheduler(
            EngineConfig(**header.settings),
            num_blocks=header.num_blocks,
            max_model_len=header.max_model_len,
            num_swap_blocks=header.num_swap_blocks,
        )
        self._steps: dict[int, StepTransaction] = {}
        self._transfers: dict[int, SwapTransfer] = {}
        self._last_decode: list[SeqId] = []
        self._last_step = -1

    def difference(self, number: int, entry: Any) -> str | None:
        """Replay one line; return how it differs from what the scheduler does, or None."""
        try:
            expected, got = self._play(entry)
        except (MoesaicError, LookupError) as error:
            expected, got = entry, f"{type(error).__name__}: {error}"
        except (TypeError, ValueError) as error:
            raise ConfigError(f"line {number} of the log holds no decision ({error}); record it again") from error
        if expected == got:
            return None
        return f"line {number}, step {self._last_step}: expected {expected}, got {got}"

    def _play(self, entry: Any) -> tuple[Any, Any]:
        """Do what ``entry`` says; return what it says came of it, and what came of it."""
        scheduler = self._scheduler
        match entry:
            case ["add", seq_id, num_prompt_tokens, max_tokens, priority, leader_id]:
                seq = scheduler.add(_request(seq_id, num_prompt_tokens, max_tokens, priority, leader_id))
                return f"sequence {seq_id}", f"sequence {seq.seq_id}"
            case ["abort" | "preempt" | "pause" | "resume" as verb, seq_id]:
                return f"{verb} {seq_id}: True", f"{verb} {seq_id}: {getattr(scheduler, verb)(str(seq_id))}"
            case ["swap_out", seq_id]:
                return f"swap_out {seq_id}: True", f"swap_out {seq_id}: {scheduler.preempt(str(seq_id), by='swap')}"
            case ["fail", seq_id]:
                return f"fail {seq_id}: True", f"fail {seq_id}: {scheduler.fail(str(seq_id), 'failed in the log')}"
            case ["step", step_id, max_tokens, decode, chunks]:
                return self._step(step_id, max_tokens, decode, chunks)
            case ["advance", step_id]:
                return f"advance {step_id}: True", f"advance {step_id}: {self._steps[step_id].advance()}"
            case ["commit", step_id, finished]:
                return self._commit(self._steps.pop(step_id), finished)
            case ["rollback", step_id]:
                self._steps.pop(step_id).rollback()
                return None, None
            case ["times", _, _, _, _, _]:  # a replay has times of its own
                return None, None
            case _:
                return self._swap(entry)

    def _step(
        self, step_id: int, max_tokens: int, decode: list[SeqId] | None, chunks: list[list[int]]
    ) -> tuple[Any, Any]:
        self._last_step = step_id
        self._last_decode = self._last_decode if decode is None else decode
        # The engine lowers the limit while memory is short, and for the decode stall bound.
        self._scheduler.max_tokens_per_step = max_tokens
        tx = self._steps[step_id] = self._scheduler.step()
        got = [row.seq_id for row in tx.plan.decode_rows], [[c.seq_id, c.start, c.num_tokens] for c in tx.plan.chunks]
        return _shown(self._last_decode, chunks), _shown(*got)

    @staticmethod
    def _commit(tx: StepTransaction, finished: list[list[Any]]) -> tuple[Any, Any]:
        stopped = {seq_id for seq_id, reason in finished if reason == "stop"}
        outputs = tx.commit([_STOP if i in stopped else _TOKEN for i in tx.plan.sampling_row_ids])
        return f"finished {finished}", f"finished {[list(row) for row in finished_rows(tx, outputs)]}"

    def _swap(self, entry: Any) -> tuple[Any, Any]:
        scheduler = self._scheduler
        match entry:
            case ["swap_in", seq_ids]:
                resting = [seq.seq_id for seq in scheduler.swap.resting()]
                scheduler.begin_swap_ins()
                got = [i for i in resting if scheduler.swap.states[i] == "in"]
                return f"swapped in {seq_ids}", f"swapped in {got}"
            case ["swap_begin", transfers]:
                begun = scheduler.take_swap_transfers()
                self._transfers.update((t.transfer_id, t) for t in begun)
                return f"copies {transfers}", f"copies {[[t.transfer_id, t.seq_id, t.direction] for t in begun]}"
            case ["swap_end", transfer_id]:
                scheduler.end_swap(self._transfers.pop(transfer_id))
            case ["swap_fail", transfer_id]:
                scheduler.fail_swap(self._transfers.pop(transfer_id))
            case _:
                raise ValueError(f"unknown entry {str(entry)[:80]}")
        return None, None


def _request(seq_id: int, num_prompt_tokens: int, max_tokens: int, priority: int, leader_id: int | None) -> Request:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(_STOP,))
    return Request(
        request_id=str(seq_id),
        prompt_token_ids=(_TOKEN,) * num_prompt_tokens,
        sampling_params=params,
        priority=priority,
        sibling_of=None if leader_id is None else str(leader_id),
    )


def _shown(decode: list[SeqId], chunks: list[list[int]]) -> str:
    return f"decode {decode}, chunks {chunks}"
