"""Which experts the tokens of a request were routed to, gathered step by step for those that ask."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import torch

from moesaic.request import RoutedTokens, StepOutput
from moesaic.sampling.transfer import HostCopy, to_device
from moesaic.sched.plan import StepPlan
from moesaic.sequence import SeqId, Sequence


class RoutedSpan(NamedTuple):
    """Query tokens of one row whose experts are wanted."""

    request_id: str
    flat_start: int
    """Index of the first of them among the step's query tokens."""
    position: int
    """Position of the first of them in the sequence."""
    num_tokens: int


class RoutingRecords:
    """What was routed of each unfinished request and is not told yet; each output tells what came before its token."""

    def __init__(self) -> None:
        self._parts: dict[str, list[RoutedTokens]] = {}
        self._num_recorded: dict[str, int] = {}

    def spans(self, plan: StepPlan, sequences: Mapping[SeqId, Sequence]) -> list[RoutedSpan]:
        """Return what this step routes: positions not yet recorded, of requests that ask for it."""
        if not any(s.request.sampling_params.routed_experts for s in sequences.values()):
            return []
        spans, flat = [], 0
        for row in plan.rows:
            request = sequences[row.seq_id].request
            num_known = max(0, self._num_recorded.get(request.request_id, 0) - row.start)
            if request.sampling_params.routed_experts and num_known < row.num_tokens:
                spans.append(
                    RoutedSpan(request.request_id, flat + num_known, row.start + num_known, row.num_tokens - num_known)
                )
            flat += row.num_tokens
        return spans

    @staticmethod
    def begin(spans: list[RoutedSpan], routed: torch.Tensor) -> HostCopy:
        """Begin the copy of the spans' rows of ``routed`` [T, L, A], in order, to the host."""
        index = np.concatenate([np.arange(s.flat_start, s.flat_start + s.num_tokens) for s in spans])
        return HostCopy(routed.index_select(0, to_device(index, routed.device)))

    def record(self, spans: list[RoutedSpan], rows: torch.Tensor, live: Collection[str]) -> None:
        """Keep what a committed step routed, ``rows`` [S, L, A] on the host, of requests that are ``live``."""
        start = 0
        for span in spans:
            part, start = rows[start : start + span.num_tokens], start + span.num_tokens
            if span.request_id in live:
                self._parts.setdefault(span.request_id, []).append(RoutedTokens.of(part.numpy()))
                self._num_recorded[span.request_id] = span.position + span.num_tokens

    def attach(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """Return ``outputs`` with what was recorded of their requests, each part once."""
        if not self._parts:
            return outputs
        return [
            o._replace(routed_experts=RoutedTokens.joined(parts))
            if (parts := self._parts.pop(o.request_id, None)) is not None
            else o
            for o in outputs
        ]

    def forget(self, request_id: str) -> None:
        """Drop what was gathered for a request that is over."""
        self._parts.pop(request_id, None)
        self._num_recorded.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._num_recorded)
