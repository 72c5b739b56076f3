"""Launching a Triton kernel, or only compiling it: many at once, before the first step needs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_is_compiling: ContextVar[bool] = ContextVar("moesaic_is_compiling", default=False)

_MOST_THREADS = 16


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch ``kernel`` (Any: a Triton function and what it takes), or within ``compiled_only`` have it compiled."""
    if _is_compiling.get():
        kernel.warmup(*arguments, grid=grid, **constants)
    else:
        kernel[grid](*arguments, **constants)


@contextmanager
def compiled_only() -> Iterator[None]:
    """Within the block of this thread no kernel runs: each is compiled for its arguments, all by the block's end.

    Outputs of kernels hold anything. A compiled kernel is kept on disk by Triton for the next start. Compiling gives
    the interpreter's lock away for most of its time, so threads share the work.
    """
    from triton import AsyncCompileMode

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads, AsyncCompileMode(threads):
        token = _is_compiling.set(True)
        try:
            yield
        finally:
            _is_compiling.reset(token)
