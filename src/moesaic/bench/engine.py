"""One engine in this process under the loads that servers are compared by, and how long it takes to start."""

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moesaic.bench.drive import drive
from moesaic.bench.engine_load import EngineLoads
from moesaic.bench.engine_rows import COLUMNS, num_ended_early, rows_of
from moesaic.bench.events import ArmRun, Recording, write_events
from moesaic.bench.load import Call, id_prompts
from moesaic.bench.progress import without_loading_bars
from moesaic.bench.report import Report, environment
from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.engine.garbage import keep_collections_short
from moesaic.models.files import resolve_model_path

_FIRST_PROMPT_TOKENS = 100
_WARM_UP_ROWS = 8
_WARM_UP_TOKENS = 32
_WARM_UP_REQUESTS = 64
_UNITS = (
    "Gaps between the tokens of a stream and TTFT in ms; tokens per second: of the outputs, and of prompts and outputs."
)
_TOLD = ("enable_chunked_prefill", "max_tokens_per_step", "prefill_chunk_size")
_COUNTED = ("num_steps", "num_prefill_chunks", "num_preemptions")
_BOUND = ("num_decode_stall_exceeded_steps", "num_decode_stall_unmet_steps")

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """From after Python's imports to an engine that has answered once; seconds."""

    ready_s: float
    first_token_s: float
    """Until the first request has its tokens."""
    stages_s: dict[str, float]
    device_bytes: int | None
    """Most memory of the GPU that was in use, if there is one."""

    def text(self) -> str:
        """Return one line; making or reading weights is told apart."""
        load_s = self.stages_s.get("load model", 0.0)
        text = f"Start-up {self.ready_s:.1f} s, of which {load_s:.1f} s load the model; first answer after "
        return f"{text}{self.first_token_s:.1f} s."


class EngineBench:
    """Measures one model under one configuration after the other and keeps the events of all of them."""

    def __init__(self, model: str, loads: EngineLoads, events_file: Path | None = None) -> None:
        """``events_file`` is written again after each configuration: what was measured survives a later failure."""
        self.model = model
        self.loads = loads
        self._events_file = events_file
        self._runs: list[ArmRun] = []

    def run(self, config: EngineConfig, progress: Progress) -> Report:
        """Return the figures of a new engine; it is gone afterwards, so that the next one finds its memory free.

        Raises: ``ModelLoadError``, ``ConfigError``; ``RequestTooLargeError`` before anything is measured.
        """
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        try:
            return self._measured(*self._started(config, progress), progress)
        finally:
            _free_memory()

    def _started(self, config: EngineConfig, progress: Progress) -> tuple[EngineCore, StartUp]:
        path = resolve_model_path(self.model, with_weights=config.load_format != "dummy", progress=progress)
        start_s = time.perf_counter()
        with without_loading_bars():
            engine = EngineCore.from_path(path, config, progress)
        ready_s = time.perf_counter() - start_s
        answer(engine, (_call("first", _FIRST_PROMPT_TOKENS, 2),))
        return engine, StartUp(
            ready_s=ready_s,
            first_token_s=time.perf_counter() - start_s,
            stages_s=dict(engine.stages.seconds),
            device_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        )

    def _measured(self, engine: EngineCore, start_up: StartUp, progress: Progress) -> Report:
        warm_up(engine, self.loads, progress)
        told = told_settings(engine.config)
        rows, samples, remarks = [], [], [_UNITS, start_up.text()]
        for kind, name, calls in self.loads.all_calls():
            before = engine.stats()
            run = self._run(engine, name, told, calls, progress)
            found = rows_of(kind, name, run)
            rows += [row.cells() for row in found]
            samples.append({"load": name, "rows": list(map(asdict, found)), "engine": _counts(before, engine.stats())})
            if early := num_ended_early(run):
                remarks.append(f"{early} streams ended before the last long prompt had its first token.")
        samples.append({"load": "start-up", **asdict(start_up), "features": engine.features()})
        return Report(
            name="engine",
            settings={"model": self.model, **told},
            columns=COLUMNS,
            rows=tuple(rows),
            remarks=tuple(remarks),
            samples=tuple(samples),
        )

    def _run(
        self, engine: EngineCore, name: str, told: Mapping[str, Any], calls: tuple[Call, ...], progress: Progress
    ) -> ArmRun:
        arm = f"{name}, {engine.config.max_tokens_per_step} tokens a step"
        prompts = id_prompts(calls, engine.model.info.vocab_size, self.loads.seed)
        progress(arm, 0.0)
        run = drive(engine, calls, prompts, arm=arm, share=lambda done: progress(arm, done))
        self._runs.append(run)
        if self._events_file is not None:
            settings = {"model": self.model, **asdict(self.loads), "engine": told}
            recording = Recording(settings=settings, environment=environment(), runs=tuple(self._runs))
            write_events(self._events_file, recording)
        return run


def with_budget(config: EngineConfig, num_tokens: int) -> EngineConfig:
    """Return ``config`` with chunked prefill and ``num_tokens`` for a step and for the chunk of one prompt.

    Raises: ``ConfigError`` if the budget is too small for the other settings.
    """
    return dataclasses.replace(
        config, enable_chunked_prefill=True, max_tokens_per_step=num_tokens, prefill_chunk_size=num_tokens
    )


def told_settings(config: EngineConfig) -> dict[str, Any]:
    """Return how prompts are split, and the other settings that are not the defaults (Any: each of its own type)."""
    values = {f.name: (getattr(config, f.name), f.default) for f in dataclasses.fields(config)}
    return {name: value for name, (value, default) in values.items() if name in _TOLD or value != default}


def warm_up(engine: EngineCore, loads: EngineLoads, progress: Progress) -> None:
    """Run what is built at its first use, or refused: the longest request of each load, steps of all sizes, company."""
    loaded = [calls for _, _, calls in loads.all_calls()]
    longest = [max(calls, key=lambda c: c.num_prompt_tokens + c.max_tokens) for calls in loaded]
    limit = min(engine.config.max_tokens_per_step, max(c.num_prompt_tokens for c in longest))
    sizes = [*(1 + 2**i for i in range(limit.bit_length() - 1)), limit]
    steps: list[tuple[Call, ...]] = [(call,) for call in longest]
    steps += [(_call(f"size-{n}", n, 2),) for n in sizes]
    steps.append(tuple(_call(f"row-{i}", _WARM_UP_TOKENS, _WARM_UP_TOKENS) for i in range(_WARM_UP_ROWS)))
    if "offline" in loads.loads:
        some = loads.offline_calls()[:_WARM_UP_REQUESTS]
        steps.append(tuple(dataclasses.replace(c, max_tokens=_WARM_UP_ROWS) for c in some))
    for i, calls in enumerate(steps):
        progress("warm up", i / len(steps))
        answer(engine, calls)
    keep_collections_short()  # as in the engine's process of a server


def answer(engine: EngineCore, calls: tuple[Call, ...]) -> None:
    """Run requests that nobody measures."""
    at_once = tuple(dataclasses.replace(c, arrival_s=0.0, lead_in_tokens=0) for c in calls)
    drive(engine, at_once, id_prompts(at_once, engine.model.info.vocab_size, 0), arm="warm up")


def _call(request_id: str, num_prompt_tokens: int, max_tokens: int) -> Call:
    return Call(request_id=request_id, role="decoder", num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)


def _counts(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the engine counted during a load, and its decode stalls (Any: JSON values)."""
    counted = {name: after[name] - before[name] for name in (*_COUNTED, *_BOUND)}
    return counted | {name: value for name, value in after.items() if name.startswith("decode_stall_")}


def _free_memory() -> None:
    """An engine's parts refer to each other; what they hold on the device is free once they are collected."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
