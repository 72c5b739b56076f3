"""Measures tiles of the expert kernels on this GPU and makes the table that ``TritonExperts`` reads."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moesaic.errors import ConfigError
from moesaic.experts.resident import ResidentExperts
from moesaic.experts.tuning import ExpertShape
from moesaic.kernels.select import triton_refusal
from moesaic.kernels.tiles import ExpertTiles, Tile

if TYPE_CHECKING:
    from moesaic.kernels.experts import Scratch

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
Progress = Callable[[str, float], None]

_MOST_PAIRWISE_TOKENS = 4
_REPLAYS = 7
_COPY_BYTES = 2**31

# (columns, depth, warps, stages), the promising ones of a wider search on one H200 (2026-12-01).
_FEW_GATE_UP = ((32, 64, 4, 6), (32, 64, 4, 8), (32, 128, 2, 4), (32, 128, 4, 3), (32, 128, 4, 4), (32, 256, 4, 3),
                (64, 64, 4, 4), (64, 128, 8, 3))  # fmt: skip
_FEW_DOWN = ((32, 128, 4, 4), (64, 128, 4, 3), (64, 128, 4, 5), (64, 256, 4, 3), (128, 128, 4, 3), (128, 128, 8, 4),
             (128, 64, 4, 4), (256, 64, 8, 4))  # fmt: skip
_MANY_GATE_UP = ((64, 64, 4, 4), (64, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4))
_MANY_DOWN = ((128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3), (256, 64, 8, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedEntry:
    """The fastest tiles for one number of tokens; times of all experts of one layer, in microseconds."""

    num_tokens: int
    tiles: ExpertTiles
    time_us: float
    floor_us: float
    """Bytes of the experts touched and of the activations, over the bandwidth of a copy."""
    grouped_us: float
    """The same by grouped products (``ResidentExperts``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What one run of the tuner found."""

    shape: ExpertShape
    device: str
    date: str
    versions: dict[str, str]
    copy_bytes_per_s: float
    entries: tuple[TunedEntry, ...]

    @property
    def max_tokens(self) -> int:
        """The most tokens up to which the fused kernels were never slower than grouped products, at least 1."""
        most = self.entries[0].num_tokens
        for entry in self.entries:
            if entry.time_us > entry.grouped_us:
                break
            most = entry.num_tokens
        return most

    def write(self, folder: Path) -> Path:
        """Write the table and return its path. Raises: ``ConfigError`` if it cannot be written."""
        path = folder / self.shape.file_name(self.device)
        fields = {**dataclasses.asdict(self), "max_tokens": self.max_tokens}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error}); choose another folder with --output") from error
        return path

    def text(self) -> str:
        """Return the table as a person reads it."""
        shape = self.shape
        head = (
            f"{shape.num_experts} experts, {shape.num_experts_per_token} per token, width {shape.width}, "
            f"expert width {shape.inner}, {shape.dtype}, {self.device}; copy {self.copy_bytes_per_s / 1e12:.2f} TB/s\n"
            " tokens  fused us  floor us  ratio  grouped us"
        )
        rows = (
            f"{e.num_tokens:7d}  {e.time_us:8.1f}  {e.floor_us:8.1f}  "
            f"{e.time_us / e.floor_us:5.2f}  {e.grouped_us:10.1f}"
            for e in self.entries
        )
        return "\n".join([head, *rows, f"fused up to {self.max_tokens} tokens"])


def tune_model(path: Path, tokens: Iterable[int] = TOKENS, progress: Progress | None = None) -> tuple[Tuning, ...]:
    """Return what is fastest here for each shape of experts in the model in ``path``; reads its configuration only.

    Raises: ``ConfigError`` without a GPU or without experts that the kernels take, ``ModelLoadError``.
    """
    from moesaic.models.loader import read_config, resolve_dtype

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _check_device(device)
    config = read_config(path)
    shapes = shapes_to_tune(config, resolve_dtype(config, None, device))
    return tuple(tune(shape, device, tokens, progress) for shape in shapes)


def shapes_to_tune(config: Any, dtype: torch.dtype) -> tuple[ExpertShape, ...]:
    """Return the shapes of a model's expert layers that the fused kernels compute; makes no weights.

    ``config`` is transformers' (Any: untyped). Raises: ``ConfigError`` if there is none, with the reason.
    """
    from moesaic.experts.triton import layer_refusal, shape_of
    from moesaic.models.hf import HFCausalLM
    from moesaic.models.loader import meta_model

    model = HFCausalLM(meta_model(config, dtype))
    refusals = [layer_refusal(module) for module in model.expert_modules.values()]
    layers = [m for m, refusal in zip(model.expert_modules.values(), refusals, strict=True) if refusal is None]
    if not layers:
        reason = str(refusals[0]) if refusals else "it has no routed experts that a backend computes"
        raise ConfigError(f"{config.model_type} has nothing to tune: {reason}")
    return tuple(dict.fromkeys(shape_of(module, model.info.num_experts_per_token) for module in layers))


def tune(
    shape: ExpertShape, device: torch.device, tokens: Iterable[int] = TOKENS, progress: Progress | None = None
) -> Tuning:
    """Return the fastest tiles for ``shape`` on ``device``, measured on random weights and uniform routing.

    Takes one to two minutes on an H200, half of it compiling. Waits for the device.
    Raises: ``ConfigError`` if ``device`` cannot run the kernels.
    """
    _check_device(device)
    import triton

    sizes = tuple(tokens)
    bench = _Bench(shape, device, max(sizes))
    entries = []
    for i, num_tokens in enumerate(sizes):
        if progress is not None:
            progress(f"{num_tokens} tokens", i / len(sizes))
        entries.append(bench.entry(num_tokens))
    return Tuning(
        shape=shape,
        device=torch.cuda.get_device_name(device),
        date=dt.datetime.now(dt.UTC).date().isoformat(),
        versions={"torch": torch.__version__, "triton": triton.__version__},
        copy_bytes_per_s=bench.copy_bytes_per_s,
        entries=tuple(entries),
    )


def _check_device(device: torch.device) -> None:
    if refusal := triton_refusal(device):
        raise ConfigError(f"nothing can be tuned here: {refusal}")


def candidates(shape: ExpertShape, num_tokens: int) -> Iterator[tuple[int, bool, tuple[Tile, ...], tuple[Tile, ...]]]:
    """Yield rows per tile, whether pairwise, and the tiles to try for gate-and-up and for down."""
    few, many = (_tiles(_FEW_GATE_UP), _tiles(_FEW_DOWN)), (_tiles(_MANY_GATE_UP), _tiles(_MANY_DOWN))
    rows_per_expert = num_tokens * shape.num_experts_per_token / shape.num_experts
    if num_tokens <= _MOST_PAIRWISE_TOKENS:
        yield 16, True, *few
    if rows_per_expert <= 16 and num_tokens > 2:
        yield 16, False, *few
    if rows_per_expert > 8:
        yield from ((rows, False, *many) for rows in (32, 64, 128) if rows / 4 <= rows_per_expert <= rows * 2)
    if rows_per_expert > 256:
        yield 128, False, *many


def _tiles(sizes: Iterable[tuple[int, int, int, int]]) -> tuple[Tile, ...]:
    return tuple(Tile(block_n=n, block_k=k, num_warps=warps, num_stages=stages) for n, k, warps, stages in sizes)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Several steps of the same size and other routing, so that no cache holds the experts of the next one."""

    x: tuple[torch.Tensor, ...]
    ids: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]


class _Bench:
    """One layer's random weights and the ways to compute it, timed within CUDA graphs."""

    def __init__(self, shape: ExpertShape, device: torch.device, most_tokens: int) -> None:
        from moesaic.kernels.experts import Scratch, fused_experts

        self._fused = fused_experts
        self._shape, self._device = shape, device
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._random = torch.Generator(device).manual_seed(0)
        self._overlaps = torch.cuda.get_device_capability(device) >= (9, 0)
        self._module = _SwigluExperts(shape, self._dtype, self._random)
        self._resident = ResidentExperts([self._module])
        self._slots = torch.arange(shape.num_experts, dtype=torch.int32, device=device)
        pairs = most_tokens * shape.num_experts_per_token
        self._scratch: Scratch = Scratch.empty(pairs, shape.width, shape.inner, self._dtype, device)
        self.copy_bytes_per_s = self._copy_bytes_per_s()

    def entry(self, num_tokens: int) -> TunedEntry:
        """Return the fastest of the candidates for ``num_tokens``: gate-and-up first, then down beside it."""
        inputs = self._inputs(num_tokens)
        found: list[tuple[float, ExpertTiles]] = []
        for block_m, is_pairwise, gate_ups, downs in candidates(self._shape, num_tokens):
            make = partial(ExpertTiles, block_m=block_m, is_pairwise=is_pairwise)
            first = self._timed(inputs, [make(gate_up=tile, down=downs[0]) for tile in gate_ups])
            best = min(first, key=lambda timed: timed[0])[1]
            found += first + self._timed(inputs, [make(gate_up=best.gate_up, down=tile) for tile in downs[1:]])
        time_us, tiles = min(found, key=lambda timed: timed[0])
        grouped = _time_us(lambda i: self._resident.forward(0, inputs.x[i], inputs.ids[i], inputs.weights[i]), inputs)
        return TunedEntry(
            num_tokens=num_tokens,
            tiles=tiles,
            time_us=round(time_us, 2),
            floor_us=round(self._floor_us(inputs), 2),
            grouped_us=round(grouped, 2),
        )

    def _timed(self, inputs: _Inputs, candidates: list[ExpertTiles]) -> list[tuple[float, ExpertTiles]]:
        """Return each candidate with its time; infinite for tiles that this GPU has no shared memory for."""
        return [(self._time_us(inputs, tiles), tiles) for tiles in candidates]

    def _time_us(self, inputs: _Inputs, tiles: ExpertTiles) -> float:
        from triton.runtime.errors import OutOfResources

        def call(i: int) -> torch.Tensor:
            return self._fused(
                inputs.x[i], self._module.gate_up_proj, self._module.down_proj, inputs.ids[i], inputs.weights[i],
                self._slots, tiles, self._scratch, self._overlaps,
            )  # fmt: skip

        try:
            return _time_us(call, inputs)
        except OutOfResources:
            return float("inf")

    def _inputs(self, num_tokens: int) -> _Inputs:
        shape, num_steps = self._shape, 16 if num_tokens <= 64 else 4
        scores = torch.empty(num_steps, num_tokens, shape.num_experts, device=self._device)
        x = torch.empty(num_steps, num_tokens, shape.width, device=self._device, dtype=self._dtype)
        chosen = scores.uniform_(generator=self._random).topk(shape.num_experts_per_token, dim=-1)
        weights = chosen.values / chosen.values.sum(-1, keepdim=True)
        return _Inputs(
            x=x.normal_(generator=self._random).unbind(),
            ids=chosen.indices.to(torch.int32).unbind(),
            weights=weights.unbind(),
        )

    def _floor_us(self, inputs: _Inputs) -> float:
        touched = statistics.mean(len(torch.unique(ids)) for ids in inputs.ids)
        activations = 2 * inputs.x[0].nbytes
        return (touched * self._shape.expert_bytes + activations) / self.copy_bytes_per_s * 1e6

    def _copy_bytes_per_s(self) -> float:
        """Return what a copy reads and writes a second; random bytes, as constant ones can be faster."""
        source = torch.randint(-(2**31), 2**31, (_COPY_BYTES // 4,), dtype=torch.int32, device=self._device)
        target = torch.empty_like(source)
        times = [_event_us(lambda: target.copy_(source)) for _ in range(_REPLAYS)]
        return 2 * _COPY_BYTES / statistics.median(times) * 1e6


class _SwigluExperts(torch.nn.Module):
    """Random experts with the attributes of transformers' fused modules."""

    has_gate, has_bias, is_transposed = True, False, False

    def __init__(self, shape: ExpertShape, dtype: torch.dtype, random: torch.Generator) -> None:
        super().__init__()
        self.num_experts = shape.num_experts

        def weights(*size: int) -> torch.nn.Parameter:
            empty = torch.empty(shape.num_experts, *size, dtype=dtype, device=random.device)
            return torch.nn.Parameter(empty.normal_(0.0, 0.02, generator=random), requires_grad=False)

        self.gate_up_proj = weights(2 * shape.inner, shape.width)
        self.down_proj = weights(shape.width, shape.inner)

    def _apply_gate(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def _time_us(call: Callable[[int], torch.Tensor], inputs: _Inputs) -> float:
    """Return the median time of one call within a CUDA graph of one call for each of ``inputs``."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(len(inputs.x)):
            call(i)
    _event_us(graph.replay)
    return statistics.median(_event_us(graph.replay) for _ in range(_REPLAYS)) / len(inputs.x)


def _event_us(call: Callable[[], Any]) -> float:
    """Return the time of ``call`` on the device; waits for it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
