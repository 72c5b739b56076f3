"""One request's progress: tokens, status and how far its KV is committed. No torch."""

from enum import Enum
from typing import NamedTuple, NewType

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import InvariantError
from moesaic.request import FinishReason, Request

SeqId = NewType("SeqId", int)
"""Position in the order of arrival."""


class Rank(NamedTuple):
    """Place in the order of service, fixed at arrival and kept through preemption: the lower, the earlier."""

    key: int
    seq_id: SeqId


class SequenceStatus(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    SWAPPED = "swapped"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


_S = SequenceStatus
_ENDS = frozenset({_S.FINISHED, _S.CANCELLED, _S.FAILED})
_TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    _S.WAITING: frozenset({_S.PREFILL, _S.DECODE, _S.FINISHED, _S.CANCELLED, _S.FAILED}),
    _S.PREFILL: frozenset({_S.DECODE, _S.SWAPPED, _S.WAITING}) | _ENDS,
    _S.DECODE: frozenset({_S.SWAPPED, _S.WAITING}) | _ENDS,
    _S.SWAPPED: frozenset({_S.PREFILL, _S.DECODE, _S.WAITING, _S.CANCELLED, _S.FAILED}),
    _S.FINISHED: frozenset(),
    _S.CANCELLED: frozenset(),
    _S.FAILED: frozenset(),
}


SequenceMark = tuple[SequenceStatus, int, int, int, int]
"""What ``Sequence.reset`` needs to undo a step: status, committed, tokens, prefill target, preemptions."""


class Sequence:
    """Prompt, outputs, status and ``committed_kv_tokens`` of one request.

    ``committed_kv_tokens`` counts the leading tokens whose KV is in the cache for good; only a commit moves it.
    While it is below ``prefill_target`` the sequence is in prefill: the target is the prompt, or after preemption
    by recompute every token known by then. The phase is derived from the counts, never from token numbers.
    """

    __slots__ = (
        "_tokens",
        "committed_kv_tokens",
        "max_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "prefill_target",
        "rank",
        "request",
        "seed",
        "seq_id",
        "status",
        "stop_ids",
    )

    def __init__(
        self,
        seq_id: SeqId,
        request: Request,
        *,
        max_tokens: int,
        eos_token_ids: tuple[int, ...] = (),
        seed: int = 0,
        rank: Rank | None = None,
    ) -> None:
        params = request.sampling_params
        self.seq_id = seq_id
        self.rank = Rank(0, seq_id) if rank is None else rank
        self.request = request
        self.max_tokens = max_tokens
        self.stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)
        self.seed = seed if params.seed is None else params.seed
        self.status = SequenceStatus.WAITING
        self.committed_kv_tokens = 0
        self.num_preemptions = 0
        self._tokens = np.array(request.prompt_token_ids, dtype=np.int64)
        self.num_tokens = self.num_prompt_tokens = len(self._tokens)
        self.prefill_target = self.num_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_prefill_tokens_left(self) -> int:
        return max(0, self.prefill_target - self.committed_kv_tokens)

    @property
    def was_preempted(self) -> bool:
        return self.num_preemptions > 0

    @property
    def is_finished(self) -> bool:
        status = self.status  # identity tests: hashing an Enum member costs a Python call
        return status is _S.FINISHED or status is _S.CANCELLED or status is _S.FAILED

    def tokens(self, start: int, num_tokens: int) -> NDArray[np.int64]:
        """Return token ids ``[start, start + num_tokens)`` as a read-only int64 view."""
        view = self._tokens[start : min(start + num_tokens, self.num_tokens)]
        view.flags.writeable = False
        return view

    @property
    def last_token_id(self) -> int:
        return int(self._tokens[self.num_tokens - 1])

    @property
    def output_token_ids(self) -> NDArray[np.int64]:
        """The output token ids so far, as a read-only int64 view."""
        return self.tokens(self.num_prompt_tokens, self.num_output_tokens)

    def move_to(self, status: SequenceStatus) -> None:
        """Change the status along the transition table.

        Raises: ``InvariantError`` for a move the table does not have.
        """
        if status not in _TRANSITIONS[self.status]:
            raise InvariantError(f"sequence {self.seq_id} cannot go from {self.status.value} to {status.value}")
        self.status = status

    def advance_prefill(self, num_tokens: int) -> None:
        """Commit the KV of ``num_tokens`` more prompt tokens; a finished prefill turns to decode.

        Raises: ``InvariantError`` if that passes the end of the prompt.
        """
        committed = self.committed_kv_tokens + num_tokens
        if num_tokens <= 0 or committed > self.prefill_target:
            raise InvariantError(
                f"sequence {self.seq_id} cannot advance by {num_tokens} from {self.committed_kv_tokens}: "
                f"its prefill ends at {self.prefill_target}"
            )
        self.committed_kv_tokens = committed
        status = SequenceStatus.DECODE if committed == self.prefill_target else SequenceStatus.PREFILL
        if status is not self.status:
            self.move_to(status)

    def advance_decode(self) -> None:
        """Commit the KV of the last token.

        Raises: ``InvariantError`` if the sequence is not decoding or has nothing to commit.
        """
        committed = self.committed_kv_tokens + 1
        if self.status is not _S.DECODE or committed != self.num_tokens:
            raise InvariantError(f"sequence {self.seq_id} ({self.status.value}) has no token to decode")
        self.committed_kv_tokens = committed

    def append_token(self, token_id: int) -> FinishReason | None:
        """Add one output token; return why the output ends with it, or None if it goes on."""
        self.append_placeholder()
        return self.fill_placeholder(token_id)

    def append_placeholder(self) -> bool:
        """Add an output token that is not known yet; return whether it is the last by length."""
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(max(64, self.num_tokens), dtype=np.int64)])
        self._tokens[self.num_tokens] = 0
        self.num_tokens += 1
        return self.num_tokens - self.num_prompt_tokens >= self.max_tokens

    def drop_placeholder(self) -> None:
        """Undo ``append_placeholder``."""
        self.num_tokens -= 1

    def fill_placeholder(self, token_id: int) -> FinishReason | None:
        """Say which token the placeholder stood for; return why the output ends with it, or None if it goes on."""
        self._tokens[self.num_tokens - 1] = token_id
        num_outputs = self.num_tokens - self.num_prompt_tokens
        if token_id in self.stop_ids and num_outputs > self.request.sampling_params.min_tokens:
            return "stop"
        return "length" if num_outputs >= self.max_tokens else None

    def restart(self) -> None:
        """Forget all KV progress (preemption by recompute): every known token is prefilled again."""
        self.move_to(SequenceStatus.WAITING)
        self.committed_kv_tokens = 0
        self.prefill_target = self.num_tokens
        self.num_preemptions += 1

    def unfork(self) -> None:
        """Undo a beginning with the KV of another: it waits and has none."""
        self.status, self.committed_kv_tokens = SequenceStatus.WAITING, 0

    def mark(self) -> SequenceMark:
        """Return what ``reset`` needs to come back to this point."""
        return self.status, self.committed_kv_tokens, self.num_tokens, self.prefill_target, self.num_preemptions

    def reset(self, mark: SequenceMark) -> None:
        """Undo everything since ``mark`` (only tokens were added, so none was lost)."""
        self.status, self.committed_kv_tokens, self.num_tokens, self.prefill_target, self.num_preemptions = mark

    def reset_decode(self, committed_kv_tokens: int) -> None:
        """Undo one decode step that began with ``committed_kv_tokens``."""
        self.status, self.committed_kv_tokens = SequenceStatus.DECODE, committed_kv_tokens
        self.num_tokens = committed_kv_tokens + 1

    def check(self) -> None:
        """Return if the counts agree.

        Raises: ``InvariantError`` naming the broken rule.
        """
        ok = 0 <= self.committed_kv_tokens <= self.num_tokens and self.prefill_target <= self.num_tokens
        ok = ok and self.num_prompt_tokens <= self.prefill_target and self.num_output_tokens <= self.max_tokens
        if self.status is SequenceStatus.DECODE:
            ok = ok and self.committed_kv_tokens == self.num_tokens - 1
        if not ok:
            raise InvariantError(
                f"sequence {self.seq_id} ({self.status.value}): committed {self.committed_kv_tokens}, "
                f"target {self.prefill_target}, tokens {self.num_tokens}, prompt {self.num_prompt_tokens}"
            )
