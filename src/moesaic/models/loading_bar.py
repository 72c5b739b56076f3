"""Tells how far transformers is with a checkpoint, in place of the bar that it would draw."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

_WEIGHTS = "Loading weights"
"""What transformers calls its bar over the tensors of a checkpoint."""


@contextlib.contextmanager
def told_to(report: Callable[[float], None]) -> Iterator[None]:
    """Report the fraction of the tensors loaded, in [0, 1], at most a hundred times; other bars stay as they are.

    A transformers without a hook for its bars draws its own, and nothing is reported.
    """
    from transformers.utils import logging as hf_logging

    if not hasattr(hf_logging, "set_tqdm_hook"):
        yield
        return

    def follow(make_bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_weights = kwargs.get("desc") == _WEIGHTS and len(args) == 1
        return counted(args[0], report) if is_weights else make_bar(*args, **kwargs)

    previous = hf_logging.set_tqdm_hook(follow)
    try:
        yield
    finally:
        hf_logging.set_tqdm_hook(previous)


def counted(items: Collection[Any], report: Callable[[float], None]) -> Iterator[Any]:
    """Yield ``items`` and report the fraction done whenever it reaches another percent."""
    told = 0
    for number, item in enumerate(items, start=1):
        yield item
        percent = 100 * number // len(items)
        if percent > told:
            told = percent
            report(percent / 100)
