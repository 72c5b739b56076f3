"""What is being done and how far it is: a bar in a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

_LINES_PER_STAGE = 4
"""Plain lines for one stage: one per quarter is enough to see that it moves."""


class StageProgress:
    """Called with a stage and the share of it that is done, 0 to 1; a context manager around all stages."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars = Progress(
            SpinnerColumn(finished_text="*"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,  # drawing takes time from what is measured
        )
        self._task: TaskID | None = None
        self._stage: str | None = None
        self._num_told = 0
        self._started_s = time.monotonic()

    def __enter__(self) -> "StageProgress":
        if self.console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._close()
        if self.console.is_terminal:
            self._bars.stop()

    def __call__(self, stage: str, share: float) -> None:
        if self.console.is_terminal:
            self._show_bar(stage, share)
        else:
            self._show_line(stage, share)
        self._stage = stage

    def _show_bar(self, stage: str, share: float) -> None:
        if stage != self._stage or self._task is None:
            self._close()
            self._task = self._bars.add_task(stage, total=1.0)
        self._bars.update(self._task, completed=min(share, 1.0))

    def _close(self) -> None:
        """A stage that is left is done: requests may end before their last token."""
        if self._task is not None:
            self._bars.update(self._task, completed=1.0)

    def _show_line(self, stage: str, share: float) -> None:
        if stage != self._stage:
            self._num_told = 0
            self._say(stage)
        elif _LINES_PER_STAGE * share >= self._num_told + 1 and share < 1.0:
            self._num_told = int(_LINES_PER_STAGE * share)
            self._say(f"{stage}: {share:.0%}")

    def _say(self, text: str) -> None:
        self.console.print(f"[{time.monotonic() - self._started_s:5.1f} s] {text}", markup=False, highlight=False)


@contextmanager
def without_loading_bars() -> Iterator[None]:
    """Keep transformers' own bars off while a model loads: two that draw at once tear each other."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
