"""Tokens chosen on the device, on their way to the host."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from moesaic.errors import SamplingError
from moesaic.request import TokenLogprobs
from moesaic.sampling.logprobs import unpacked_logprobs
from moesaic.sampling.row import SamplingRow
from moesaic.sampling.transfer import HostCopy

# A row's token id says what is wrong with it: the one copy to the host then carries the check as well.
BROKEN = -1
NOTHING_LEFT = -2


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per sampling row, and its log probabilities where the row asked for them."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """Stands for ``PendingTokens`` where a sampler has waited."""

    sampled: SampledTokens

    def result(self) -> SampledTokens:
        """Return the tokens."""
        return self.sampled


class PendingTokens:
    """What a sampler has begun: the next step may use ``token_ids`` on the device before the host has them."""

    def __init__(
        self, token_ids: torch.Tensor, rows: SequenceOf[SamplingRow], asking: list[int], packed: torch.Tensor | None
    ) -> None:
        """``packed`` has the log probabilities of the rows ``asking`` for them; copies to the host begin here."""
        self.token_ids = token_ids
        """int64 [S], negative for a row that cannot have a token."""
        self._rows = rows
        self._asking = asking
        self._chosen = HostCopy(token_ids)
        self._packed = None if packed is None else HostCopy(packed)

    def result(self) -> SampledTokens:
        """Return the tokens; waits for the device.

        Raises: ``SamplingError`` if a row has NaN or infinite logits or no token that may be chosen.
        """
        chosen = self._chosen.wait().tolist()
        _check_choices(chosen, self._rows)
        return SampledTokens(tuple(chosen), self._logprobs())

    def _logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        result: list[TokenLogprobs | None] = [None] * len(self._rows)
        if self._packed is not None:
            entries = unpacked_logprobs(self._packed.wait(), [self._rows[i].params.logprobs or 0 for i in self._asking])
            for i, entry in zip(self._asking, entries, strict=True):
                result[i] = entry
        return tuple(result)


def _check_choices(chosen: list[int], rows: SequenceOf[SamplingRow]) -> None:
    bad = tuple(i for i, token_id in enumerate(chosen) if token_id < 0)
    if not bad:
        return
    causes = {
        BROKEN: "has NaN or infinite logits",
        NOTHING_LEFT: "has no token left (logit_bias, min_tokens, penalties and grammar remove all)",
    }
    listed = "; ".join(f"row {i} at output {len(rows[i].output_token_ids)} {causes[chosen[i]]}" for i in bad)
    message = f"no token can be sampled for {len(bad)} of {len(rows)} rows: {listed}"
    raise SamplingError(message, rows=bad, own_fault_rows=tuple(i for i in bad if chosen[i] == NOTHING_LEFT))
