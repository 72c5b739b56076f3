"""Print which torch operations give a row other bits when other rows are beside it; docs/determinism.md has a run.

A row is put at several places among other random rows, for several numbers of rows. ``count``: numbers of rows for
which it differs from the row alone. ``place``: numbers of rows for which it depends on where the row lies.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

NUM_ROWS = (2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 100, 256)
FEW_ROWS = (2, 3, 5, 16)
NUM_TRIALS = 8

RowWise = Callable[[torch.Tensor], torch.Tensor]


class Operation(NamedTuple):
    """A function of rows [M, width] that gives one output per row."""

    name: str
    width: int
    apply: RowWise
    num_rows: tuple[int, ...] = NUM_ROWS


class Finding(NamedTuple):
    """Numbers of rows that change a row's bits, and those in which its place does."""

    by_count: set[int]
    by_place: set[int]


def find(operation: Operation) -> Finding:
    """Return for which numbers of rows a row's result changes."""
    found = Finding(set(), set())
    for _ in range(NUM_TRIALS):
        row = torch.randn(1, operation.width)
        alone = operation.apply(row)[0]
        for num_rows in operation.num_rows:
            results = [_among(operation, row, num_rows, p) for p in {0, num_rows // 3, num_rows // 2, num_rows - 1}]
            if not all(torch.equal(alone, r) for r in results):
                found.by_count.add(num_rows)
            if not all(torch.equal(results[0], r) for r in results):
                found.by_place.add(num_rows)
    return found


def _among(operation: Operation, row: torch.Tensor, num_rows: int, place: int) -> torch.Tensor:
    """Return the row's result at ``place`` among random rows."""
    rows = torch.randn(num_rows, operation.width)
    rows[place] = row[0]
    return operation.apply(rows)[place]


def operations() -> list[Operation]:
    """Return what lies on the path from tokens to tokens."""
    return [
        *(_linear(c, n) for c, n in ((48, 8), (48, 96), (576, 1536), (1536, 576))),
        _linear(576, 49152, FEW_ROWS),
        *(_experts(c, i) for c, i in ((48, 24), (576, 1536))),
        *(_attention(head_dim, num_keys) for head_dim, num_keys in ((16, 40), (64, 300))),
        *(Operation(f"sigmoid, width {w}", w, torch.sigmoid) for w in (4, 8, 24, 64)),
        *(Operation(f"softplus, width {w}", w, functional.softplus) for w in (24, 64)),
        *(Operation(f"gelu (tanh), width {w}", w, _gelu) for w in (24, 64)),
        *(Operation(f"silu(gate) * up, width {w}", 2 * w, _gated) for w in (24, 50, 1536)),
        *(Operation(f"rms norm, width {w}", w, _rms_norm) for w in (16, 48, 50, 576)),
        Operation("layer norm, width 50", 50, lambda x: functional.layer_norm(x, (50,))),
        *(Operation(f"cos and sin, width {w}", w, lambda x: torch.cat([x.cos(), x.sin()], -1)) for w in (8, 50)),
        *(Operation(f"softmax, width {w}", w, lambda x: x.softmax(-1)) for w in (2, 8, 128)),
        *(Operation(f"topk of {w}", w, lambda x: torch.cat(x.topk(2, dim=-1), -1)) for w in (8, 128)),
        Operation("sum over 8 chosen experts", 8 * 48, lambda x: x.view(-1, 8, 48).sum(1)),
        Operation("index_select, index_copy", 48, _there_and_back),
        *(Operation(f"softmax, vocabulary {v}", v, lambda x: (3 * x).softmax(-1), FEW_ROWS) for v in (49152, 151936)),
        *(
            Operation(f"sum of exponentials, vocabulary {v}", v, lambda x: x.exp().sum(-1, keepdim=True), FEW_ROWS)
            for v in (160, 49152, 151936)
        ),
    ]


def _linear(width: int, out: int, num_rows: tuple[int, ...] = NUM_ROWS) -> Operation:
    weight = torch.randn(out, width) * width**-0.5
    return Operation(f"linear {width} to {out}", width, lambda x: functional.linear(x, weight), num_rows)


def _experts(width: int, out: int) -> Operation:
    """Return one of 8 experts, the only one with rows."""
    weight = torch.randn(8, width, out) * width**-0.5
    first = torch.arange(8) >= 3

    def apply(x: torch.Tensor) -> torch.Tensor:
        return functional.grouped_mm(x, weight, offs=(first * len(x)).to(torch.int32))

    return Operation(f"grouped_mm, 8 experts, {width} to {out}", width, apply)


def _attention(head_dim: int, num_keys: int) -> Operation:
    """Return one query head over keys that all queries share, as chunks of M queries."""
    keys, values = torch.randn(2, 1, 1, num_keys, head_dim)
    mask = torch.zeros(1, 1, 1, num_keys)

    def apply(x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x[None, None], keys, values, attn_mask=mask)[0, 0]

    return Operation(f"attention over {num_keys} keys of {head_dim}", head_dim, apply)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _rms_norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _there_and_back(x: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(len(x))
    return torch.empty_like(x).index_copy_(0, order, x.index_select(0, order))


@torch.inference_mode()
def table() -> str:
    """Return a Markdown table with one row per operation."""
    torch.manual_seed(0)
    head = f"torch {torch.__version__}, threads {torch.get_num_threads()}, {torch.backends.cpu.get_cpu_capability()}"
    lines = [head, "", "| operation | count | place |", "|---|---|---|"]
    for operation in operations():
        found = find(operation)
        places = ", ".join(map(str, sorted(found.by_place))) or "none"
        lines.append(f"| {operation.name} | {len(found.by_count)} of {len(operation.num_rows)} | {places} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
