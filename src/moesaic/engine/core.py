"""The loop: plan, batch, forward, sample, commit. Synchronous and single-threaded."""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from functools import partial
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import torch

from moesaic.attention.base import AttentionLimits
from moesaic.attention.select import Selection, select_attention
from moesaic.batch import CarriedTokens, RaggedBatch
from moesaic.config import EngineConfig
from moesaic.engine.deadlines import Deadlines
from moesaic.engine.launched import LaunchedStep, overlap_refusal
from moesaic.engine.memory import FreeMemory, context_length, plan_memory, resolve_device
from moesaic.engine.meters import StepMeters, StepStart
from moesaic.engine.prompt_logprobs import PromptLogprobs
from moesaic.engine.routing import RoutedSpan, RoutingRecords
from moesaic.engine.stages import StageClock
from moesaic.engine.stall_bound import DecodeStallBound, bound_stats
from moesaic.engine.step_log import StepLog
from moesaic.engine.step_time import StepSizes
from moesaic.errors import EngineDeadError, Refused, RequestError
from moesaic.experts.select import ExpertSelection, select_experts
from moesaic.experts.triton import TritonExperts
from moesaic.graphs import DecodeGraphs, GraphableAttention, graph_refusal
from moesaic.kv.geometry import KVGeometry
from moesaic.kv.store import LayeredPagedKVStore
from moesaic.kv.swap import HostSwapPool
from moesaic.models.base import CausalLM
from moesaic.models.compile import compile_kernels, step_sizes
from moesaic.models.files import load_tokenizer
from moesaic.models.loader import load_model
from moesaic.models.native import NativeCausalLM
from moesaic.models.select import ModelSelection, select_model
from moesaic.request import Request, SamplingParams, StepOutput
from moesaic.runner import ModelRunner
from moesaic.sampling.grammar import Grammars, LoadTokenizer
from moesaic.sampling.pending import KnownTokens, PendingTokens
from moesaic.sampling.row import SamplingRow
from moesaic.sampling.rowwise import RowwiseSampler
from moesaic.sampling.sampler import Sampler
from moesaic.sampling.transfer import HostCopy
from moesaic.sched.factory import make_scheduler
from moesaic.sched.transaction import StepTransaction
from moesaic.segments import SegmentGraphs
from moesaic.sequence import Sequence
from moesaic.tokenwise import TokenwiseRunner, check_tokenwise

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]


class EngineCore:
    """Serves requests of token ids over one model. Not thread-safe: one owner calls it.

    Raises: ``ConfigError`` for settings that this model or this machine cannot meet, before KV is allocated.
    """

    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        load_tokenizer: LoadTokenizer | None = None,
        progress: Progress | None = None,
        stages: StageClock | None = None,
    ) -> None:
        """``load_tokenizer`` is called once a request has a grammar; without it such requests are refused.

        ``progress`` is told what is done and how far, in [0, 1]; ``stages`` goes on from what came before.
        """
        config.validate()
        self.config = config
        if config.batch_invariant:
            check_tokenwise(model.device)
        self.stages = StageClock() if stages is None else stages
        self.definition: ModelSelection = select_model(config.model_impl, model, strict=config.strict)
        model = self.model = self.definition.model
        self.max_model_len = context_length(config, model.info.max_model_len)
        geometry = KVGeometry(
            layers=model.info.kv_shapes, block_size=config.block_size, element_bytes=model.dtype.itemsize
        )
        self.attention: Selection = select_attention(config.attention_backend, geometry, model.device, config.strict)
        self.experts: ExpertSelection = select_experts(
            config.expert_backend,
            model.experts,
            model.info.num_experts_per_token,
            config.max_tokens_per_step,
            strict=config.strict,
        )
        model.experts = self.experts.backend
        self.stages.lap("choose kernels")
        self.memory = plan_memory(config, geometry, self.max_model_len, FreeMemory.of(model.device))
        num_blocks = self.memory.num_kv_blocks
        store = LayeredPagedKVStore(geometry, num_blocks, model.dtype, model.device)
        self.stages.lap("allocate KV")
        self.attention.backend.prepare(
            AttentionLimits(
                geometry=geometry,
                dtype=model.dtype,
                num_query_heads=model.info.num_query_heads,
                max_rows=config.max_batch_size,
                max_tokens=config.max_tokens_per_step,
                max_pages=num_blocks,
            )
        )
        make_runner = TokenwiseRunner if config.batch_invariant else ModelRunner
        self.runner = make_runner(model, self.attention.backend, store)
        self.stages.lap("prepare attention")
        self._compile_kernels(progress)
        self.stages.lap("compile kernels")
        self._graph_refusal = self._capture_graphs(progress)
        self.stages.lap("capture steps")
        self.scheduler = make_scheduler(
            config,
            num_blocks=num_blocks,
            max_model_len=self.max_model_len,
            num_swap_blocks=config.swap_space_bytes // geometry.bytes_per_block,
            eos_token_ids=model.info.eos_token_ids,
        )
        self.swap_pool = HostSwapPool(store)
        self._deadlines = Deadlines(clock)
        self._meters = StepMeters(clock)
        self._stall_bound = DecodeStallBound.of(config)
        self._step_log = StepLog(clock)
        make_sampler = RowwiseSampler if config.batch_invariant else Sampler
        self.sampler = make_sampler(vocab_size=model.info.vocab_size, eos_token_ids=model.info.eos_token_ids)
        self._prompt_logprobs = PromptLogprobs()
        self._routing = RoutingRecords()
        self._grammars = Grammars(
            vocab_size=model.info.vocab_size,
            eos_token_ids=model.info.eos_token_ids,
            load_tokenizer=load_tokenizer,
        )
        self._overlap_refusal = overlap_refusal(config, model.device)
        self.plans_ahead = self._overlap_refusal is None
        """Whether each step is launched before the tokens of the one before it have come."""
        self._launched: LaunchedStep | None = None
        self._failed_step: StepTransaction | None = None
        self._death_cause: BaseException | None = None
        logger.info("kv budget: blocks=%d block_size=%d bytes=%d", num_blocks, config.block_size, self.memory.kv_bytes)

    def _compile_kernels(self, progress: Progress | None) -> None:
        """Compile what steps of any size will need, if kernels are compiled at all."""
        model, experts = self.model, self.model.experts
        if not isinstance(model, NativeCausalLM) or not isinstance(experts, TritonExperts):
            return
        if progress is not None:
            progress("compile kernels", 0.0)
        sizes = step_sizes(min(self.config.max_tokens_per_step, experts.max_tokens))
        compile_kernels(model, self.attention.backend, self.runner.store, sizes)
        if progress is not None:
            progress("compile kernels", 1.0)

    def _capture_graphs(self, progress: Progress | None) -> Refused | None:
        """Capture decode steps, or return why there are no graphs."""
        if not self.config.cuda_graphs:
            return Refused("switched off")
        refusal = graph_refusal(self.model, self.attention.backend, self.model.device)
        experts = self.model.experts
        if refusal is None and isinstance(self.model, NativeCausalLM) and isinstance(experts, TritonExperts):
            graphable = cast(GraphableAttention, self.attention.backend)  # graph_refusal has looked
            store = self.runner.store
            max_rows = min(self.config.max_batch_size, experts.max_tokens)
            self.runner.graphs = DecodeGraphs(self.model, graphable, store, max_rows, progress)
            max_tokens = min(self.config.max_tokens_per_step, experts.max_tokens)
            self.runner.segments = SegmentGraphs(self.model, graphable, store, max_tokens, progress)
        return refusal

    @classmethod
    def from_path(cls, path: Path, config: EngineConfig, progress: Progress | None = None) -> "EngineCore":
        """Return an engine over the model in ``path``; ``progress`` is told what is done and how far, in [0, 1].

        Raises: ``ModelLoadError``, ``ConfigError``.
        """
        config.validate()
        stages = StageClock()
        device = resolve_device(config.device)
        dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
        model = load_model(
            path, dtype=dtype, device=device, load_format=config.load_format, seed=config.seed, progress=progress
        )
        stages.lap("load model")
        return cls(model, config, load_tokenizer=partial(load_tokenizer, path), progress=progress, stages=stages)

    def prepare_grammars(self) -> None:
        """Do now what the first request with a grammar would make all others wait for, up to seconds."""
        self._grammars.prepare()

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """Queue a request; nothing is allocated for it yet.

        A lower ``priority`` goes first (scheduling policy ``priority`` only). After ``timeout_s`` seconds an unfinished
        request ends with an error.
        Raises: ``RequestError`` for a bad prompt, id or parameter, ``RequestTooLargeError`` if it can never be served,
        ``QueueFullError`` if too many wait, ``EngineDeadError`` after ``shut``.
        """
        self.check_alive()
        params = SamplingParams() if sampling_params is None else sampling_params
        if not request_id:
            raise RequestError(f"request id is {request_id!r}; it must be a non-empty string", param="request_id")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling params are {type(params).__name__}; pass SamplingParams(...)")
        prompt = self._checked_prompt(prompt_token_ids)
        self._add(
            Request(request_id=request_id, prompt_token_ids=prompt, sampling_params=params, priority=priority),
            timeout_s,
        )

    def add_sibling(
        self,
        request_id: str,
        sibling_of: str,
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """Queue a request with the prompt of ``sibling_of``, whose KV it begins with once that is computed.

        Raises: as ``add_request``; ``RequestError`` also if ``sibling_of`` is unknown or over.
        """
        self.check_alive()
        leader = self.scheduler.get(sibling_of)
        if leader is None:
            raise RequestError(
                f"request {sibling_of!r} is unknown or over, so its prompt cannot be shared; send the prompt again",
                param="sibling_of",
            )
        request = Request(
            request_id=request_id,
            prompt_token_ids=leader.request.prompt_token_ids,
            sampling_params=sampling_params,
            priority=priority,
            sibling_of=sibling_of,
        )
        self._add(request, timeout_s)

    def _add(self, request: Request, timeout_s: float | None) -> None:
        """Queue a request whose prompt is checked: all or nothing."""
        params = request.sampling_params
        self.sampler.check_params(params)
        if params.routed_experts and self.model.experts is None:
            raise RequestError("this model's experts do not tell their routing; leave it out", param="routed_experts")
        self._check_priority(request.priority)
        self._deadlines.check(timeout_s)
        wanted = params.structured_output
        matcher = None if wanted is None else self._grammars.compile(wanted)
        self.scheduler.add(request)
        self._deadlines.add(request.request_id, timeout_s)
        if matcher is not None:
            self._grammars.begin(request.request_id, matcher)
        self._meters.begin(request.request_id)

    def _check_priority(self, priority: Any) -> None:  # Any: a client's input
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise RequestError(f"priority is {priority!r}; it must be an integer", param="priority")
        if priority and self.config.scheduling_policy != "priority":
            raise RequestError(
                f"priority is {priority} but this server runs {self.config.scheduling_policy}; "
                "leave it out or start with --scheduling-policy priority",
                param="priority",
            )

    def _checked_prompt(self, token_ids: SequenceOf[Any]) -> tuple[int, ...]:  # Any: a client's input
        if isinstance(token_ids, str | bytes):
            raise RequestError("prompt is text; the engine takes token ids, LLM takes text", param="prompt")
        prompt = tuple(token_ids)
        if not prompt:
            raise RequestError("prompt has 0 tokens; it needs at least 1", param="prompt")
        vocab_size = self.model.info.vocab_size
        if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < vocab_size:
            return prompt  # at C speed: 100,000 ids must not hold up the running streams
        for token_id in prompt:
            is_int = isinstance(token_id, Integral) and not isinstance(token_id, bool)
            if not is_int or not 0 <= int(token_id) < vocab_size:
                raise RequestError(
                    f"prompt has token id {token_id!r}; this model has ids from 0 to {vocab_size - 1}", param="prompt"
                )
        return tuple(map(int, prompt))

    def abort_request(self, request_id: str) -> bool:
        """End a request; its terminal event comes with the next ``step``. False if it is unknown or over."""
        self._forget(request_id)
        is_new = self.scheduler.abort(request_id)
        self._drop_empty_step()
        return is_new

    def fail_request(self, request_id: str, error: str) -> bool:
        """End a request with ``error``, as ``abort_request`` does."""
        self._forget(request_id)
        is_new = self.scheduler.fail(request_id, error)
        self._drop_empty_step()
        return is_new

    def _forget(self, request_id: str) -> None:
        """Keep nothing of a request that is over; the scheduler forgets it by itself."""
        self._prompt_logprobs.forget(request_id)
        self._routing.forget(request_id)
        self._grammars.forget(request_id)
        self._deadlines.forget(request_id)
        self._meters.forget(request_id)

    def shut(self, cause: BaseException) -> None:
        """Refuse requests and steps from now on; the first cause stays."""
        self._death_cause = self._death_cause or cause

    @property
    def death_cause(self) -> BaseException | None:
        """Why the engine refuses all work; None while it serves."""
        return self._death_cause

    def check_alive(self) -> None:
        """Return unless the engine was ``shut``.

        Raises: ``EngineDeadError`` then.
        """
        if self._death_cause is not None:
            raise engine_dead(self._death_cause)

    def pause_request(self, request_id: str) -> bool:
        """Set a request aside; it holds no KV meanwhile. False if it is unknown, over or paused."""
        is_new = self.scheduler.pause(request_id)
        self._drop_empty_step()
        return is_new

    def resume_request(self, request_id: str) -> bool:
        """Let a paused request go on where it was; False if it is not paused."""
        return self.scheduler.resume(request_id)

    def has_pending_requests(self) -> bool:
        """Return True while a request that is not paused is unfinished, a step has not ended, or an event is untold."""
        return self.scheduler.has_unfinished or self._launched is not None

    def step(self) -> list[StepOutput]:
        """Run one step; return what each request got (nothing for progress-only rows).

        On a GPU the next step is queued before this one's tokens are waited for, so requests and aborts that come now
        take effect in the step after that.
        Any exception leaves scheduler, cache and sequences as they were before the step; ``take_failed_step`` has its
        rows.
        """
        self.check_alive()
        self._failed_step = None
        for request_id, timeout_s in self._deadlines.expired():
            self.fail_request(request_id, f"unfinished after {timeout_s} s (timeout_s); allow more time")
        step, self._launched = self._launched, None
        if step is None:
            self._swap()
            step = self._launch()
        if step is None:
            return self.scheduler.take_events()
        following = self._launch_behind(step)
        outputs = self._end(step, following)
        self._launched = following
        self._drop_empty_step()
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.request_id)
        return self.scheduler.take_events() + outputs

    def _drop_empty_step(self) -> None:
        """Forget the step in flight if all its rows have left it: what it still writes, no later step reads before."""
        if self._launched is not None and not self._launched.tx.has_rows:
            self._launched.tx.rollback()
            self._launched = None

    def _launch(self, carried: CarriedTokens | None = None) -> LaunchedStep | None:
        """Plan a step and queue its work; None if nothing can run."""
        if self._stall_bound is not None:
            self._stall_bound.limit(self.scheduler)
        start, laps = self._meters.start(self.scheduler), self._step_log.begin()
        tx = self.scheduler.step()
        self._step_log.lap(laps)
        try:
            if tx.plan.num_rows:
                return self._queue(tx, start, laps, carried)
        except BaseException:
            self._failed_step = tx
            tx.rollback()
            raise
        tx.rollback()
        return None

    def _queue(
        self, tx: StepTransaction, start: StepStart, laps: list[float], carried: CarriedTokens | None
    ) -> LaunchedStep:
        spans = self._prompt_logprobs.spans(tx.plan, tx.sequences)
        extra = list(chain.from_iterable(range(s.flat_start, s.flat_start + len(s.target_token_ids)) for s in spans))
        batch = RaggedBatch.of(
            tx.plan,
            tx.sequences,
            self.scheduler.kv,
            extra_logit_indices=extra,
            carried=carried,
            device=self.model.device,
        )
        routed_spans = self._routing.spans(tx.plan, tx.sequences)
        logits, routed = self._run(batch, routed_spans)
        sampled = self._sample(logits[: batch.num_sampling_rows], tx)
        return LaunchedStep(
            tx=tx,
            start=start,
            laps_s=laps,
            sampled=sampled,
            spans=spans,
            prompt_logits=logits[batch.num_sampling_rows :],
            routed_spans=routed_spans,
            routed=routed,
        )

    def _run(self, batch: RaggedBatch, routed_spans: list[RoutedSpan]) -> tuple[torch.Tensor, HostCopy | None]:
        """Return the logits, and the experts of the tokens of ``routed_spans`` on their way to the host."""
        if not routed_spans:
            return self.runner.run(batch), None
        with self.runner.traced() as trace:
            logits = self.runner.run(batch)
        return logits, self._routing.begin(routed_spans, trace.routed())

    def _launch_behind(self, step: LaunchedStep) -> LaunchedStep | None:
        """Plan and queue the step after ``step``, whose tokens have not come; None if that must wait or is impossible.

        One that fails is planned again once ``step`` has ended, as any other.
        """
        if not self.plans_ahead or (carried := step.carried()) is None:
            return None
        try:
            return self._launch(carried) if step.tx.advance() else None
        except Exception:
            logger.exception("a step launched behind another failed; it is planned again")
            self._failed_step = None
            return None
        except BaseException:
            step.tx.rollback()
            raise

    def _end(self, step: LaunchedStep, following: LaunchedStep | None) -> list[StepOutput]:
        """Wait for the tokens and commit; if that fails, undo the step that follows, then this one."""
        try:
            outputs = self._commit(step)
        except BaseException:
            self._failed_step = step.tx
            if following is not None:
                following.tx.rollback()
            step.tx.rollback()
            raise
        stall_s = self._meters.commit(step.start, step.tx)
        self._step_log.commit(step.laps_s, step.tx, self.scheduler)
        if self._stall_bound is not None and stall_s is not None:
            self._stall_bound.observe(StepSizes.of(step.tx.plan), stall_s)
        return outputs

    def _commit(self, step: LaunchedStep) -> list[StepOutput]:
        sampled = step.sampled.result()
        scores = self._prompt_logprobs.score(self.sampler, step.prompt_logits, step.spans)
        routed = None if step.routed is None else step.routed.wait()
        self._step_log.lap(step.laps_s)
        live = {s.request_id for s in step.routed_spans if self.scheduler.get(s.request_id) is not None}
        outputs = step.tx.commit(sampled.token_ids, sampled.logprobs)
        self._prompt_logprobs.record(step.spans, scores)
        if routed is not None:
            self._routing.record(step.routed_spans, routed, live)
        outputs = self._routing.attach(self._prompt_logprobs.attach(outputs, step.tx.sequences))
        for output in outputs:
            if output.finish_reason is not None:
                self._grammars.forget(output.request_id)
                self._routing.forget(output.request_id)
        return outputs + self._prompt_progress(step.tx)

    def _prompt_progress(self, tx: StepTransaction) -> list[StepOutput]:
        """Return how far the prompts that the step computed a part of are; preemption may set them back later."""
        parts = ((c.start + c.num_tokens, tx.sequences[c.seq_id]) for c in tx.plan.chunks if not c.is_terminal)
        return [
            StepOutput(seq.request.request_id, (), num_computed_prompt_tokens=num_computed)
            for num_computed, seq in parts
            if seq.request.sampling_params.prompt_progress
            and self.scheduler.get(seq.request.request_id) is seq
            and num_computed < seq.num_prompt_tokens
            and not seq.num_output_tokens
        ]

    def _swap(self) -> None:
        """Make the copies that the last commit asked for, and bring back who fits; a failed copy costs a recompute."""
        scheduler = self.scheduler
        scheduler.begin_swap_ins()
        for transfer in scheduler.take_swap_transfers():
            try:
                self.swap_pool.run(transfer)
            except (RuntimeError, MemoryError):
                logger.exception("swap %s of %d blocks failed", transfer.direction, len(transfer.block_ids))
                scheduler.fail_swap(transfer)
            else:
                scheduler.end_swap(transfer)
        self.swap_pool.keep(scheduler.swap.states)

    def take_failed_step(self) -> StepTransaction | None:
        """Return the transaction of the last step, once, if it failed; None too if it failed before it had a plan."""
        step, self._failed_step = self._failed_step, None
        return step

    def _sample(self, logits: torch.Tensor, tx: StepTransaction) -> PendingTokens | KnownTokens:
        sequences = [tx.sequences[i] for i in tx.plan.sampling_row_ids]
        rows = self._grammars.restrict([_sampling_row(s) for s in sequences], [s.request.request_id for s in sequences])
        return self.sampler.begin(logits, rows)

    def stats(self) -> dict[str, Any]:
        """Return counts and gauges, and what is requested and active of each optional feature (Any: JSON values)."""
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        by_status: dict[str, int] = {}
        for seq in scheduler.sequences:
            by_status[seq.status.value] = by_status.get(seq.status.value, 0) + 1
        return {
            **asdict(scheduler.counts),
            "num_waiting": scheduler.num_waiting,
            "num_running": len(scheduler.running),
            "num_requests_by_status": by_status,
            "num_kv_blocks": pool.num_blocks,
            "kv_blocks_total": pool.num_blocks,
            "kv_blocks_free": pool.num_free,
            "kv_block_size_tokens": self.config.block_size,
            "kv_bytes": self.memory.kv_bytes,
            "num_paused": len(scheduler.paused),
            "num_swapped": len(scheduler.swap.states),
            "swap_bytes": self.swap_pool.num_bytes,
            "swap_copied_bytes": self.swap_pool.num_copied_bytes,
            "num_grammars": len(self._grammars),
            "max_model_len": self.max_model_len,
            "start_up_seconds": dict(self.stages.seconds),
            "features": self.features(),
            **self._meters.stats(),
            **bound_stats(self._stall_bound),
        }

    def steps_after(self, number: int | None) -> dict[str, Any]:
        """Return the steps behind the one with this number, as ``StepLog.after`` does; steps are kept from now on."""
        return self._step_log.after(number, self.scheduler)

    def features(self) -> dict[str, dict[str, Any]]:
        """Return requested, active and reason of each optional feature (Any: booleans or names)."""
        is_chunked, bound_ms = self.config.enable_chunked_prefill, self.config.max_decode_stall_ms
        experts = self.model.experts
        return {
            "chunked_prefill": {"requested": is_chunked, "active": is_chunked, "reason": "as requested"},
            "decode_stall_bound": {
                "requested": bound_ms is not None,
                "active": bound_ms is not None,
                "reason": "not requested" if bound_ms is None else f"chunks are sized to steps of {bound_ms} ms",
            },
            "attention_backend": {
                "requested": self.attention.requested,
                "active": self.attention.active,
                "reason": self.attention.reason,
            },
            "batch_invariant": {
                "requested": self.config.batch_invariant,
                "active": self.config.batch_invariant,
                "reason": "each token runs and samples alone" if self.config.batch_invariant else "not requested",
            },
            "model": {
                "requested": self.definition.requested,
                "active": self.definition.active,
                "reason": self.definition.reason,
            },
            "cuda_graphs": {
                "requested": self.config.cuda_graphs,
                "active": self.runner.graphs is not None,
                "reason": str(self._graph_refusal or "as requested"),
            },
            "overlap": {
                "requested": self.config.overlap,
                "active": self.plans_ahead,
                "reason": str(self._overlap_refusal or "as requested"),
            },
            "experts": {
                "requested": self.experts.requested,
                "active": self.experts.active,
                "reason": self.experts.reason,
                **({} if experts is None else experts.stats()),
            },
        }


def engine_dead(cause: BaseException) -> EngineDeadError:
    """Return a new error for one waiter, ``cause`` chained; a shared one would gather all their tracebacks."""
    error = EngineDeadError(f"the engine has stopped: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _sampling_row(seq: Sequence) -> SamplingRow:
    params = seq.request.sampling_params
    # An array view: penalties would convert a tuple in every step. Nobody else reads the prompt.
    prompt = seq.tokens(0, seq.num_prompt_tokens) if params.changes_logits else ()
    return SamplingRow(params, prompt, seq.output_token_ids, seq.seed)
