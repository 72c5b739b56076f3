"""Paged attention by FlashInfer: decode rows and prompt chunks each by the kernel that suits them.

A plan of FlashInfer serves one kind of layer (heads, window, scale, softcap) and one step. It is made when the first
such layer runs and used by all the others. FlashInfer 0.6.12 on an H200 (2026-12-01): 32 decode rows of 4,096 tokens
take 0.12 ms by fa2 with the heads of a group packed, 0.56 by fa3; a chunk of 8,192 tokens 1.73 and 1.08.
"""

from __future__ import annotations

import importlib.util
import math
import subprocess
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.attention.base import AttentionParams
from moesaic.attention.gathered import GatheredKV, GatheredLayout
from moesaic.errors import ConfigError, InvariantError, Refused

if TYPE_CHECKING:
    from moesaic.attention.base import AttentionLimits
    from moesaic.batch import RaggedBatch
    from moesaic.kv.geometry import KVGeometry

HEAD_DIMS = (64, 128, 256)
"""Those that both fa2 and fa3 are built for."""

_FLOAT_TYPES = (torch.bfloat16, torch.float16)
_OLDEST_CAPABILITY = (8, 0)
_FA3_CAPABILITY = 9
_FA3_TILE_TOKENS = 128
_SPARE_WORKSPACE_BYTES = 1 << 20
_INT_WORKSPACE_BYTES = 1 << 20  # plans of decode rows: some 20 bytes for each of at most a few thousand pieces


class FlashInferAttention:
    """Attention over paged KV by FlashInfer's kernels; one float workspace serves all plans, in stream order.

    Any below: FlashInfer's wrappers are untyped.
    """

    name = "flashinfer"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        properties = torch.cuda.get_device_properties(device)
        self._num_sms: int = properties.multi_processor_count
        self._has_fa3 = properties.major == _FA3_CAPABILITY
        self._limits: AttentionLimits | None = None
        self._workspace: torch.Tensor | None = None
        self._decode: dict[_LayerKind, _Wrapper] = {}
        self._chunks: dict[tuple[_LayerKind, str], _Wrapper] = {}
        self._gathered: GatheredKV | None = None

    def supports(self, geometry: KVGeometry) -> Refused | None:
        """Return why FlashInfer cannot serve these layers, or None if it can."""
        if geometry.element_bytes != 2:
            return Refused(f"it takes bfloat16 and float16, these layers store {geometry.element_bytes} bytes a number")
        for shape in geometry.layers:
            if shape.key_dim != shape.value_dim or shape.key_dim not in HEAD_DIMS:
                return Refused(f"it takes heads of {HEAD_DIMS}, not keys of {shape.key_dim}, values {shape.value_dim}")
        return None

    def prepare(self, limits: AttentionLimits) -> None:
        """Allocate the workspace of the largest step and plan that step once.

        Builds the kernels if no earlier start has (an H200 machine of 16 cores took 28 s for fa2 and 74 s for fa3).
        Raises: ``ConfigError`` if they cannot be built or the step cannot be planned.
        """
        self._limits = limits
        self._decode.clear()  # wrappers keep the workspace they were made with
        self._chunks.clear()
        shapes = set(limits.geometry.layers)
        num_bytes = max(workspace_bytes(limits, s.num_kv_heads, s.key_dim, self._num_sms) for s in shapes)
        try:
            self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            self._gathered = GatheredKV(limits, self.device) if self._has_fa3 else None
            for shape in shapes:
                kind = _LayerKind(limits.num_query_heads, shape.num_kv_heads, shape.key_dim, limits.dtype)
                for rows in _largest_steps(limits, self.device):
                    self._planned(kind, rows)
        except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:  # no compiler, no memory
            raise ConfigError(
                f"FlashInfer cannot plan the largest step ({limits.max_rows} rows, {limits.max_tokens} tokens) in "
                f"{num_bytes} bytes: {str(error).strip()[-300:]}; use --attention-backend torch"
            ) from error

    def plan(self, batch: RaggedBatch) -> FlashInferPlan:
        """Return the step's metadata; kinds of layers are planned when their first layer runs."""
        return FlashInferPlan(batch)

    def decode_graph(self, num_rows: int) -> DecodeGraphAttention:
        """Return a backend for captured steps of ``num_rows`` decode rows.

        Raises: ``InvariantError`` before ``prepare``.
        """
        if self._limits is None:
            raise InvariantError("the FlashInfer backend has no limits; call prepare first")
        return DecodeGraphAttention(self, num_rows, self._limits.max_pages, self._limits.geometry.block_size)

    def run(
        self,
        plan: FlashInferPlan,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        params: AttentionParams,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output [T, H, D] of ``query`` [T, H, D] in its dtype, in ``out`` if given; never waits.

        Raises: ``InvariantError`` if the tokens are not the plan's.
        """
        if len(query) != plan.num_tokens:
            raise InvariantError(f"query has {len(query)} tokens but the step was planned for {plan.num_tokens}")
        kind, query = _LayerKind.of(query, key_pages, params), query.contiguous()
        out = torch.empty_like(query) if out is None else out
        for part in plan.parts(kind, self):
            first, last = part.rows.first_token, part.rows.last_token
            kv: tuple[Any, ...] = ((key_pages, value_pages),)
            if part.layout is not None and self._gathered is not None:
                kv = self._gathered.gather(part.layout, key_pages, value_pages)
            _run(part.wrapper, query[first:last], kv, out[first:last], params)
        return out

    def _planned(self, kind: _LayerKind, rows: _Rows) -> _Part:
        """Return ``rows`` with a wrapper planned for them; the last plan of the same wrapper is void."""
        if rows.is_decode:
            return _Part(self._decode_wrapper(kind).plan(kind, rows), rows)
        if self._is_gathered(kind, rows):
            layout = GatheredLayout.of(rows.kv_lengths, rows.page_indices, rows.block_size)
            return _Part(self._gathered_wrapper(kind).plan_gathered(kind, rows), rows, layout)
        return _Part(self._chunk_wrapper(kind, rows).plan(kind, rows), rows)

    def _is_gathered(self, kind: _LayerKind, rows: _Rows) -> bool:
        if self._gathered is None or kind.window is not None or self._chunk_kernel(kind, rows) != "fa3":
            return False
        query_lengths, kv_lengths = rows.query_offsets.diff().tolist(), rows.kv_lengths.tolist()
        return self._gathered.is_worth_it(query_lengths, kv_lengths, kind.num_heads // kind.num_kv_heads)

    def _gathered_wrapper(self, kind: _LayerKind) -> _Wrapper:
        if (kind, "gathered") not in self._chunks:
            import flashinfer

            made = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self.workspace, "NHD", backend="fa3")
            self._chunks[kind, "gathered"] = _Wrapper(made)
        return self._chunks[kind, "gathered"]

    def _decode_wrapper(self, kind: _LayerKind) -> _Wrapper:
        if kind not in self._decode:
            import flashinfer

            # Tensor cores: fa2 with the queries of a KV head packed into one tile.
            made = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.workspace, "NHD", use_tensor_cores=True)
            self._decode[kind] = _Wrapper(made)
        return self._decode[kind]

    def _chunk_wrapper(self, kind: _LayerKind, rows: _Rows) -> _Wrapper:
        name = self._chunk_kernel(kind, rows)
        if (kind, name) not in self._chunks:
            import flashinfer

            made = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", backend=name)
            self._chunks[kind, name] = _Wrapper(made)
        return self._chunks[kind, name]

    def _chunk_kernel(self, kind: _LayerKind, rows: _Rows) -> Literal["fa2", "fa3"]:
        """Return fa3 where its tiles keep two fifths of the device busy: fa2 splits KV and packs heads, fa3 does not.

        One chunk on 16,384 tokens, 32 query and 4 KV heads of 128 (H200, 2026-12-01), fa2 and fa3 in ms: 64 tokens
        0.12 and 0.28, 128 0.17 and 0.28, 256 0.28 and 0.28, 512 0.51 and 0.30, 8,192 7.8 and 4.8.
        """
        tiles = sum(-(-n // _FA3_TILE_TOKENS) for n in rows.query_offsets.diff().tolist()) * kind.num_heads
        return "fa3" if self._has_fa3 and 5 * tiles >= 2 * self._num_sms else "fa2"

    @property
    def workspace(self) -> torch.Tensor:
        """uint8: where kernels that split KV keep their parts. Raises: ``InvariantError`` before ``prepare``."""
        if self._workspace is None:
            raise InvariantError("the FlashInfer backend has no workspace; call prepare first")
        return self._workspace


@dataclass(frozen=True, slots=True)
class _LayerKind:
    """What FlashInfer wants to know at plan time; layers that agree share a plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float = 1.0
    window: int | None = None
    softcap: float | None = None

    @classmethod
    def of(cls, query: torch.Tensor, key_pages: torch.Tensor, params: AttentionParams) -> _LayerKind:
        return cls(
            num_heads=query.shape[1],
            num_kv_heads=key_pages.shape[2],
            head_dim=query.shape[2],
            dtype=query.dtype,
            scale=params.scale,
            window=params.sliding_window,
            softcap=params.logit_softcap,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Consecutive rows of a step as FlashInfer wants them. int32; all but ``page_indices`` on the host."""

    first_token: int
    last_token: int
    is_decode: bool
    query_offsets: torch.Tensor
    """[R + 1]: FlashInfer's ``qo_indptr``."""
    page_offsets: torch.Tensor
    """[R + 1], from the KV lengths: ``paged_kv_indptr``."""
    last_page_lengths: torch.Tensor
    """[R], in tokens."""
    page_indices: torch.Tensor
    """On the device."""
    block_size: int

    @property
    def kv_lengths(self) -> NDArray[np.int64]:
        """[R], in tokens."""
        lengths = (self.page_offsets.diff() - 1) * self.block_size + self.last_page_lengths
        return np.asarray(lengths, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a step and who computes them (Any: FlashInfer is untyped)."""

    wrapper: Any
    rows: _Rows
    layout: GatheredLayout | None = None
    """If their KV is copied into one piece first."""


class _Wrapper:
    """One of FlashInfer's wrappers. Its pinned plan must be on the device before the next one overwrites it."""

    def __init__(self, wrapper: Any) -> None:  # Any: FlashInfer is untyped
        self.wrapped = wrapper
        self._is_planned = False
        self._is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def plan(self, kind: _LayerKind, rows: _Rows) -> Any:
        """Return the wrapper planned for ``rows``; waits for the copy of its last plan, mostly long done."""
        self._is_copied.synchronize()
        if not rows.is_decode:
            self.wrapped.plan(
                qo_indptr=rows.query_offsets,
                paged_kv_indptr=rows.page_offsets,
                paged_kv_indices=rows.page_indices,
                paged_kv_last_page_len=rows.last_page_lengths,
                head_dim_qk=kind.head_dim,
                causal=True,
                o_data_type=kind.dtype,
                **_layer_arguments(kind, rows),
            )
        elif self._is_planned:
            _plan_decode_again(self.wrapped, kind, rows)
        else:
            _plan_decode(self.wrapped, kind, rows)
        self._is_planned = True
        self._is_copied.record()
        return self.wrapped

    def plan_gathered(self, kind: _LayerKind, rows: _Rows) -> Any:
        """Return the wrapper, one for KV in one piece, planned for ``rows``; waits as ``plan`` does."""
        self._is_copied.synchronize()
        arguments = _layer_arguments(kind, rows)
        del arguments["page_size"]
        self.wrapped.plan(
            qo_indptr=rows.query_offsets,
            kv_indptr=_offsets(rows.kv_lengths),
            head_dim_qk=kind.head_dim,
            causal=True,
            o_data_type=kind.dtype,
            **arguments,
        )
        self._is_copied.record()
        return self.wrapped


class FlashInferPlan:
    """The decode rows and the chunk rows of one step, planned for each kind of layer once."""

    def __init__(self, batch: RaggedBatch) -> None:
        self.num_tokens = batch.num_tokens
        self._rows = _split_rows(batch)
        self._planned: dict[_LayerKind, list[_Part]] = {}

    def parts(self, kind: _LayerKind, backend: FlashInferAttention) -> list[_Part]:
        """Return the rows, those of each kernel with its planned wrapper."""
        if kind not in self._planned:
            self._planned[kind] = [backend._planned(kind, rows) for rows in self._rows]
        return self._planned[kind]


class DecodeGraphAttention:
    """An attention backend for captured steps of exactly ``num_rows`` decode rows, of which the last may be padding.

    All metadata is overwritten in place by ``update``. A kind of layer joins when its first layer runs, which must be
    in a step before the capture. Memory: the block indices and 1 MiB for plans, both on device and host.
    """

    name = "flashinfer"

    def __init__(self, backend: FlashInferAttention, num_rows: int, max_pages: int, block_size: int) -> None:
        device = backend.device
        self._backend, self._num_rows, self._block_size = backend, num_rows, block_size
        # Page offsets, then the lengths of last pages: one copy moves both.
        self._metadata = torch.zeros(2 * num_rows + 1, dtype=torch.int32, device=device)
        self._host_metadata = torch.zeros(2 * num_rows + 1, dtype=torch.int32, pin_memory=True)
        self._is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._page_indices = torch.zeros(max_pages + num_rows, dtype=torch.int32, device=device)
        self._wrappers: dict[_LayerKind, Any] = {}
        self._layouts: dict[_LayerKind, tuple[int, ...]] = {}
        self._rows: _Rows | None = None

    def supports(self, geometry: KVGeometry) -> Refused | None:
        """Return what the backend says."""
        return self._backend.supports(geometry)

    def prepare(self, limits: AttentionLimits) -> None:
        """Change nothing: the backend is prepared."""

    def update(self, kv_seq_lengths: SequenceOf[int], page_indices: torch.Tensor) -> None:
        """Plan for rows of these KV lengths, which own ``page_indices`` (int32, on the device) one after the other.

        Rows that are missing are padding, which reads one token of block 0. Does not wait for the device, except for
        the copy of its own last plan.
        Raises: ``InvariantError`` for more rows or blocks than there is room for, and if a kernel would be launched
        otherwise than when it was captured (not seen: FlashInfer fixes the layout by the number of rows).
        """
        num_padding, num_pages = self._num_rows - len(kv_seq_lengths), len(page_indices)
        if num_padding < 0 or num_pages + num_padding > len(self._page_indices):
            raise InvariantError(
                f"{len(kv_seq_lengths)} rows with {num_pages} blocks do not fit a captured step of {self._num_rows} "
                f"rows and {len(self._page_indices)} blocks"
            )
        self._page_indices[:num_pages].copy_(page_indices, non_blocking=True)
        if num_padding:
            self._page_indices[num_pages : num_pages + num_padding].zero_()
        self._is_copied.synchronize()
        self._rows = self._filled_rows([*kv_seq_lengths, *[1] * num_padding], num_pages + num_padding)
        self._metadata.copy_(self._host_metadata, non_blocking=True)
        for kind, wrapper in self._wrappers.items():
            _plan_decode_again(wrapper, kind, self._rows)
            layout = _layout(wrapper)
            if layout != self._layouts[kind]:
                raise InvariantError(f"a captured launch of {self._layouts[kind]} would now be {layout}")
        self._is_copied.record()

    def _filled_rows(self, kv_lengths: list[int], num_pages: int) -> _Rows:
        """Return the rows, their metadata in pinned memory."""
        kv, host = np.array(kv_lengths, dtype=np.int32), self._host_metadata
        offsets, last = host[: self._num_rows + 1], host[self._num_rows + 1 :]
        np.cumsum(-(-kv // self._block_size), out=offsets.numpy()[1:])
        np.add((kv - 1) % self._block_size, 1, out=last.numpy())
        return _Rows(
            first_token=0,
            last_token=self._num_rows,
            is_decode=True,
            query_offsets=offsets,  # not used: a decode row has one query
            page_offsets=offsets,
            last_page_lengths=last,
            page_indices=self._page_indices[:num_pages],
            block_size=self._block_size,
        )

    def plan(self, batch: RaggedBatch) -> None:
        """Return nothing: ``update`` plans."""

    def run(
        self,
        plan: None,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        params: AttentionParams,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output [num_rows, H, D]; in a capture, of whatever ``update`` says before a replay.

        Raises: ``InvariantError`` before the first ``update`` and for another number of rows.
        """
        if len(query) != self._num_rows or self._rows is None:
            raise InvariantError(f"a captured step of {self._num_rows} rows got {len(query)}, or no update before it")
        kind = _LayerKind.of(query, key_pages, params)
        if kind not in self._wrappers:
            self._join(kind, self._rows)
        query = query.contiguous()
        out = torch.empty_like(query) if out is None else out
        _run(self._wrappers[kind], query, ((key_pages, value_pages),), out, params)
        return out

    def _join(self, kind: _LayerKind, rows: _Rows) -> None:
        import flashinfer

        workspace = self._backend.workspace
        made = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self._metadata[: self._num_rows + 1],
            paged_kv_indices_buffer=self._page_indices,
            paged_kv_last_page_len_buffer=self._metadata[self._num_rows + 1 :],
        )
        # Plans of its own (FlashInfer's are 8 MiB): one of another size must not lie where a captured launch reads.
        own = torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=workspace.device)
        made.reset_workspace_buffer(workspace, own)
        self._wrappers[kind] = made
        _plan_decode(made, kind, rows)
        self._layouts[kind] = _layout(made)
        self._is_copied.record()


def workspace_bytes(limits: AttentionLimits, num_kv_heads: int, head_dim: int, num_sms: int) -> int:
    """Return what FlashInfer may need for the parts of split KV in any step within ``limits``.

    ``pieces * tile_q * query heads * (head_dim + 1) * 4`` bytes: a piece is a tile of packed queries times a part of
    the KV. KV is split until ``2 * num_sms / num_kv_heads`` pieces; a captured decode step always has one more piece
    for every row and tile, and rows up to the next power of two. Source: ``PrefillPlan`` in FlashInfer 0.6.12's
    scheduler.cuh.
    """
    max_rows = 1 << (limits.max_rows - 1).bit_length()
    group = limits.num_query_heads // num_kv_heads
    most_split = 2 * num_sms // num_kv_heads
    decode_tile, chunk_tile = _tile(group, head_dim), _tile(group * limits.max_tokens, head_dim)
    captured = max(most_split, -(-max_rows * group // decode_tile) + max_rows - 1)
    queries = max(captured * decode_tile, most_split * chunk_tile)
    return queries * limits.num_query_heads * (head_dim + 1) * 4 + _SPARE_WORKSPACE_BYTES


def flashinfer_backend(device: torch.device) -> FlashInferAttention | Refused:
    """Return the backend for ``device``, or why there is none."""
    if device.type != "cuda":
        return Refused(f"FlashInfer needs a CUDA device, this is {device.type}")
    if importlib.util.find_spec("flashinfer") is None:
        return Refused("flashinfer is not installed; pip install flashinfer-python")
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_CAPABILITY:
        return Refused(f"compute capability is {capability}, FlashInfer needs {_OLDEST_CAPABILITY} or newer")
    try:
        import flashinfer  # noqa: F401  # an installation that lacks a part of its own must not end the start
    except (ImportError, OSError, RuntimeError) as error:
        return Refused(f"flashinfer cannot be imported: {error}")
    return FlashInferAttention(device)


def _tile(packed_queries: int, head_dim: int) -> int:
    """Return the packed queries of one tile, for this many a row (FlashInfer's ``FA2DetermineCtaTileQ``)."""
    if packed_queries > 64 and head_dim < 256:
        return 128
    return 64 if packed_queries > 16 else 16


def _split_rows(batch: RaggedBatch) -> list[_Rows]:
    """Return the decode rows and the chunk rows, as far as there are any; decode rows that verify drafts are chunks."""
    lengths = batch.lengths
    query, kv = np.asarray(lengths.query_lengths), np.asarray(lengths.kv_seq_lengths)
    num_decode = batch.num_decode_rows if (query[: batch.num_decode_rows] == 1).all() else 0
    num_pages = -(-kv // batch.block_size)
    num_decode_pages = int(num_pages[:num_decode].sum())
    make = partial(_rows, block_size=batch.block_size)
    rows = []
    if num_decode:
        indices = batch.page_indices[:num_decode_pages]
        rows.append(make(query[:num_decode], kv[:num_decode], indices, 0, is_decode=True))
    if num_decode < len(query):
        first, indices = lengths.query_offsets[num_decode], batch.page_indices[num_decode_pages:]
        rows.append(make(query[num_decode:], kv[num_decode:], indices, first, is_decode=False))
    return rows


def _rows(
    query: np.ndarray[Any, Any],
    kv: np.ndarray[Any, Any],
    page_indices: torch.Tensor,
    first_token: int,
    *,
    is_decode: bool,
    block_size: int,
) -> _Rows:
    """Return rows of these query and KV lengths."""
    return _Rows(
        first_token=first_token,
        last_token=first_token + int(query.sum()),
        is_decode=is_decode,
        query_offsets=_offsets(query),
        page_offsets=_offsets(-(-kv // block_size)),
        last_page_lengths=torch.from_numpy(((kv - 1) % block_size + 1).astype(np.int32)),
        page_indices=page_indices,
        block_size=block_size,
    )


def _decode_rows(kv: np.ndarray[Any, Any], page_indices: torch.Tensor, block_size: int) -> _Rows:
    return _rows(np.ones_like(kv), kv, page_indices, 0, is_decode=True, block_size=block_size)


def _offsets(lengths: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return int32 [R + 1]: where each row begins, and the end of the last."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _largest_steps(limits: AttentionLimits, device: torch.device) -> list[_Rows]:
    """Return the steps that may need most: all rows decoding, one chunk of all tokens, and a quarter of that.

    The last has tiles few enough that its KV is split.
    """
    block_size, most = limits.geometry.block_size, limits.max_pages
    each = max(1, most // limits.max_rows)
    blocks = partial(torch.zeros, dtype=torch.int32, device=device)
    rows = [_decode_rows(np.full(limits.max_rows, each * block_size), blocks(limits.max_rows * each), block_size)]
    longest = most * block_size
    for num_tokens in sorted({min(longest, -(-limits.max_tokens // 4)), min(longest, limits.max_tokens)}):
        query, kv = np.array([num_tokens]), np.array([longest])
        rows.append(_rows(query, kv, blocks(most), 0, is_decode=False, block_size=block_size))
    return rows


def _layer_arguments(kind: _LayerKind, rows: _Rows) -> dict[str, Any]:
    """Return what all of FlashInfer's plans take of a kind of layer (Any: of several types)."""
    return {
        "num_qo_heads": kind.num_heads,
        "num_kv_heads": kind.num_kv_heads,
        "page_size": rows.block_size,
        "window_left": -1 if kind.window is None else kind.window - 1,
        "logits_soft_cap": kind.softcap,
        "sm_scale": kind.scale,
        "q_data_type": kind.dtype,
        "kv_data_type": kind.dtype,
    }


def _plan_decode(wrapper: Any, kind: _LayerKind, rows: _Rows) -> None:  # Any: FlashInfer is untyped
    wrapper.plan(
        indptr=rows.page_offsets,
        indices=rows.page_indices,
        last_page_len=rows.last_page_lengths,
        head_dim=kind.head_dim,
        o_data_type=kind.dtype,
        **_layer_arguments(kind, rows),
    )


def _plan_decode_again(wrapper: Any, kind: _LayerKind, rows: _Rows) -> None:  # Any: FlashInfer is untyped
    """Plan a wrapper that was planned before by FlashInfer's short cut, which leaves the device's metadata to us.

    ``plan`` compares the KV lengths one by one as tensors and copies from pageable memory: 0.22 ms of host time for
    one row and 0.36 for 32 on an H200 machine (0.6.12, 2026-12-01).
    """
    from flashinfer.decode import fast_decode_plan

    is_captured = wrapper.is_cuda_graph_enabled
    device = rows.page_indices.device
    fast_decode_plan(
        wrapper,
        indptr=rows.page_offsets if is_captured else rows.page_offsets.to(device, non_blocking=True),
        indices=rows.page_indices,
        last_page_len=rows.last_page_lengths,
        head_dim=kind.head_dim,
        global_override_indptr_cpu=rows.page_offsets,
        **_layer_arguments(kind, rows),
    )
    if not is_captured:  # it took the host's tensor, whose values it needs there
        wrapper._paged_kv_last_page_len_buf = rows.last_page_lengths.to(device, non_blocking=True)


def _layout(wrapper: Any) -> tuple[int, ...]:  # Any: FlashInfer is untyped
    """Return all host integers that a launch of this plan takes; its device memory may change, these may not."""
    return tuple(int(entry) for entry in wrapper._plan_info)


def _run(
    wrapper: Any, query: torch.Tensor, kv: tuple[Any, ...], out: torch.Tensor, params: AttentionParams,
) -> None:  # fmt: skip
    """Write the attention of ``query`` to ``out``; ``kv`` as the wrapper takes it (Any: FlashInfer is untyped)."""
    if params.sinks is None:
        wrapper.run(query, *kv, out=out)
        return
    _, lse = wrapper.run(query, *kv, out=out, return_lse=True)
    # A sink adds exp(sink) to the softmax's denominator: the rest keeps the share exp(lse) / (exp(lse) + exp(sink)).
    share = torch.sigmoid(lse * math.log(2.0) - params.sinks.float())  # FlashInfer's lse has base 2
    out.mul_(share.unsqueeze(-1).to(out.dtype))
