"""Two servers under the same load in turns: A B A B."""

import asyncio
import shlex
import tempfile
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from moesaic.bench.arm import own_server
from moesaic.bench.client import Dialect, Prompt, Target, find_dialect, run_load
from moesaic.bench.events import ArmRun, Recording, StepColumn
from moesaic.bench.load import Call, LoadSettings, id_prompts, make_calls, text_prompts
from moesaic.bench.paused import paused
from moesaic.bench.report import environment
from moesaic.bench.steps import read_steps
from moesaic.demo.scene import load_document
from moesaic.errors import ConfigError
from moesaic.kv.geometry import blocks_for_tokens
from moesaic.models.files import load_tokenizer, resolve_model_path

BLOCK_SIZE = 16
_MIN_WORDS_PER_TOKEN = 0.75
"""Of English text; used where the model's tokenizer is not at hand."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSettings:
    """A server of ours with these flags, or the one at ``url``."""

    name: str
    model: str
    flags: tuple[str, ...] = ()
    url: str | None = None

    def __post_init__(self) -> None:
        if self.url is not None and self.flags:
            raise ConfigError(
                f"arm {self.name!r} has both flags and a URL; flags are for servers that are started here"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSettings:
    """Arms (the first is the baseline), load, and the bounds of goodput."""

    model: str
    arms: tuple[ArmSettings, ...]
    load: LoadSettings = field(default_factory=LoadSettings)
    num_pairs: int = 3
    max_ttft_s: float = 2.0
    max_stall_s: float = 0.2
    pause_idle: bool = False
    """Stop the servers that are not measured (those of this machine; see ``moesaic.bench.paused``)."""


def chunking_arms(model: str, chunk_sizes: SequenceOf[int] = (128,)) -> tuple[ArmSettings, ...]:
    """Return chunked prefill off, then on with each of ``chunk_sizes``."""
    off = ArmSettings(name="chunking off", model=model, flags=("--no-enable-chunked-prefill",))
    on = (
        ArmSettings(
            name=f"chunking on, {size} tokens",
            model=model,
            flags=("--enable-chunked-prefill", "--prefill-chunk-size", str(size)),
        )
        for size in chunk_sizes
    )
    return (off, *on)


def base_flags(load: LoadSettings, calls: SequenceOf[Call]) -> tuple[str, ...]:
    """Return the flags that all arms of ours start from: whole prompts fit a step, and KV blocks for all at once.

    ``pressure`` has a third of those blocks, though always enough for the longest request.
    """
    needs = [blocks_for_tokens(c.num_prompt_tokens + c.max_tokens, BLOCK_SIZE) + 2 for c in calls]
    num_blocks = max(sum(needs) // 3, max(needs) + 2) if load.workload == "pressure" else sum(needs)
    max_tokens = max(2048, len(calls) + max(c.num_prompt_tokens for c in calls) + BLOCK_SIZE)
    values = {
        "--max-tokens-per-step": max_tokens,
        "--max-batch-size": len(calls),
        "--block-size": BLOCK_SIZE,
        "--num-kv-blocks": num_blocks,
    }
    return tuple(part for name, value in values.items() for part in (name, str(value)))


def run_comparison(settings: ComparisonSettings, progress: Progress) -> Recording:
    """Start the arms, warm both up with the load, and return the events of ``num_pairs`` rounds.

    Raises: ``MoesaicError`` if an arm does not come up or answers no request.
    """
    calls = make_calls(settings.load)
    base = base_flags(settings.load, calls)
    where = environment()
    with tempfile.TemporaryDirectory() as folder:
        logs = {a.name: Path(folder) / f"{i}.jsonl" for i, a in enumerate(settings.arms) if a.url is None}
        with ExitStack() as stack:
            targets = []
            for i, arm in enumerate(settings.arms):
                progress("start the arms", i / len(settings.arms))
                targets.append(_entered(stack, arm, base, logs))
            runs, kind = asyncio.run(_rounds(settings, calls, targets, progress))
        # The servers have ended, so their logs are complete.
        last = {run.arm: run for run in runs}
        steps = {name: _steps(path, last[name]) for name, path in logs.items()}
    runs = [_with_peak(run, steps.get(run.arm, ())) if run is last[run.arm] else run for run in runs]
    told = {**asdict(settings), "base_flags": shlex.join(base), "prompts": kind}
    return Recording(settings=told, environment=where, runs=tuple(runs), steps=steps)


def _steps(log: Path, run: ArmRun) -> tuple[StepColumn, ...]:
    """Return the steps of ``run``; none if a request failed, as then the log may name fewer than there were."""
    if any(r.error for r in run.requests):
        return ()
    return read_steps(log, tuple(r.request_id for r in sorted(run.requests, key=lambda r: r.arrival_s)))


def _with_peak(run: ArmRun, steps: SequenceOf[StepColumn]) -> ArmRun:
    """Looks at the stats miss what is between them; the steps of the last run do not."""
    return replace(run, peak_kv_blocks=max([run.peak_kv_blocks or 0, *(s.kv_blocks for s in steps)])) if steps else run


def _entered(stack: ExitStack, arm: ArmSettings, base: tuple[str, ...], logs: dict[str, Path]) -> Target:
    if arm.url is not None:
        return Target(url=arm.url.rstrip("/").removesuffix("/v1"), model=arm.model)
    flags = (*base, *arm.flags, "--decision-log", str(logs[arm.name]))
    return stack.enter_context(own_server(arm.model, flags))


async def _rounds(
    settings: ComparisonSettings, calls: SequenceOf[Call], targets: SequenceOf[Target], progress: Progress
) -> tuple[list[ArmRun], str]:
    ids, texts = _prompts(settings, calls)
    found = [await find_dialect(t, ids[0][:8] if ids else None, "Hello there") for t in targets]
    uses_ids = all(d.takes_ids for d in found)
    prompts: SequenceOf[Prompt] = ids if ids and uses_ids else texts
    # The same fields to all: what one refuses would give the others longer outputs.
    dialect = Dialect(takes_ids=uses_ids, takes_extras=all(d.takes_extras for d in found))
    runs = []
    for pair in range(-1, settings.num_pairs):
        for i, (arm, target) in enumerate(zip(settings.arms, targets, strict=True)):
            stage = "warm up" if pair < 0 else f"pair {pair + 1} of {settings.num_pairs}"
            progress(f"{stage}: {arm.name}", i / len(targets))
            idle = [t for t in targets if t is not target] if settings.pause_idle else []
            with paused(idle):
                run = await run_load(target, dialect, calls, prompts, pair=pair, arm=arm.name)
            if pair >= 0:
                runs.append(run)
    return runs, "token ids" if prompts is ids else "text"


def _prompts(
    settings: ComparisonSettings, calls: SequenceOf[Call]
) -> tuple[tuple[tuple[int, ...], ...] | None, tuple[str, ...]]:
    """Return prompts as token ids (None for ``smol``, which reads real text, and for models only known by URL)."""
    text = load_document().text
    count: Callable[[str], int] = _rough_count
    ids: tuple[tuple[int, ...], ...] | None = None
    if any(arm.url is None for arm in settings.arms):
        path = resolve_model_path(settings.model)
        tokenizer = load_tokenizer(path)
        if tokenizer is not None:
            count = _counter(tokenizer)
        if not settings.model.startswith("smol"):
            ids = id_prompts(calls, _vocab_size(path), settings.load.seed)
    return ids, text_prompts(calls, text, count, settings.load.seed)


def _vocab_size(path: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(path, local_files_only=True).get_text_config().vocab_size)


def _counter(tokenizer: Any) -> Callable[[str], int]:  # Any: transformers' tokenizers share no typed base class
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _rough_count(text: str) -> int:
    return int(len(text.split()) / _MIN_WORDS_PER_TOKEN)


def pair_of(recording: Recording, baseline: str, candidate: str) -> Recording:
    """Return the runs of two of the arms."""
    return replace(recording, runs=tuple(r for r in recording.runs if r.arm in (baseline, candidate)))
