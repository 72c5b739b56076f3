"""The demonstration's answers and timelines on 80 columns, in a terminal or a pipe."""

import textwrap
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from moesaic.bench.timeline import Scenario, Timeline, token_strip
from moesaic.demo.run import DemoRuns
from moesaic.demo.scene import DOCUMENT_QUESTION, QUESTIONS, DemoSettings, load_document

_STRIP_WIDTH = 64


def show_runs(runs: DemoRuns, console: Console) -> None:
    """Print what was asked and answered, both timelines, and how to read them."""
    settings, scenario = runs.settings, runs.scenario
    _say(console, "")
    _say(console, _setting_line(settings, scenario))
    _show_answers(runs, console)
    _say(console, "")
    console.print(_table(runs, is_plain=not console.is_terminal))
    _show_strips(runs, console)
    _say(console, "")
    _say(console, reading(scenario, runs.off, runs.on))


def _setting_line(settings: DemoSettings, scenario: Scenario) -> str:
    return (
        f"Model {settings.model}, greedy, float32 on this CPU. {len(scenario.streams)} streams of at most "
        f"{settings.max_tokens} tokens; after {scenario.lead_in_tokens} tokens each, a prompt of "
        f"{len(scenario.late.prompt_token_ids)} tokens arrives. Chunks of at most {settings.chunk_size} tokens "
        "when chunking is on."
    )


def _show_answers(runs: DemoRuns, console: Console) -> None:
    tokenizer = runs.tokenizer
    for question, ask, times in zip(QUESTIONS, runs.scenario.streams, runs.on.streams, strict=False):
        _say(console, f"\nQ: {question}")
        _say(console, "A: " + _answer(tokenizer, times.token_ids, ask.max_tokens), indent="   ")
    document, late = load_document(), runs.scenario.late
    _say(console, f"\nQ: [{document.title}, {len(document.text.split())} words, {document.licence}]")
    _say(console, f"   {DOCUMENT_QUESTION}")
    _say(console, "A: " + _answer(tokenizer, runs.on.late.token_ids, late.max_tokens), indent="   ")


def _answer(tokenizer: Any, token_ids: tuple[int, ...], max_tokens: int) -> str:  # Any: of transformers
    """Return an output as one line, with dots if ``max_tokens`` cut it off."""
    text = " ".join(tokenizer.decode(list(token_ids), skip_special_tokens=True).split())
    return f"{text} ..." if len(token_ids) >= max_tokens else text


def _say(console: Console, text: str, indent: str = "") -> None:
    """Print plain words, without what this terminal or file cannot hold (random models say anything)."""
    shown = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    shown = shown.encode(console.encoding, "replace").decode(console.encoding)
    width = min(console.width, 80)
    lines = (textwrap.fill(line, width, subsequent_indent=indent) for line in shown.split("\n"))
    console.print("\n".join(lines), markup=False, highlight=False, emoji=False)


def _table(runs: DemoRuns, *, is_plain: bool) -> Table:
    table = Table(box=box.ASCII if is_plain else box.SIMPLE_HEAD)
    table.add_column("")
    for name in ("chunking off", "chunking on"):
        table.add_column(name, justify="right")
    off, on = _column(runs.off), _column(runs.on)
    for label in off:
        table.add_row(label, off[label], on[label])
    table.add_row("tokens equal", "yes" if runs.off.outputs == runs.on.outputs else "no", "")
    return table


def _column(timeline: Timeline) -> dict[str, str]:
    p50, p99 = np.percentile(timeline.itl_s, (50, 99))
    return {
        "TTFT of the document": seconds(timeline.ttft_s),
        "ITL of the streams*: p50": seconds(p50),
        "ITL of the streams*: p99": seconds(p99),
        "ITL of the streams*: largest (the stall)": seconds(timeline.stall_s),
        "parts of the document (prefill chunks)": str(timeline.num_late_chunks),
        "steps in all": str(timeline.num_steps),
        "whole run": seconds(timeline.ended_s - timeline.started_s),
    }


def seconds(value: float) -> str:
    """Return seconds with three significant digits or so."""
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms" if value >= 0.01 else f"{1000 * value:.1f} ms"


def _show_strips(runs: DemoRuns, console: Console) -> None:
    span_s = max(t.ended_s - t.started_s for t in (runs.off, runs.on))
    _say(console, "* gaps between tokens that ended after the document arrived")
    _say(console, f"\nTokens of the streams, one character per {seconds(span_s / _STRIP_WIDTH)} (# some, . none):")
    for name, timeline in (("off", runs.off), ("on", runs.on)):
        _say(console, f"{name:>4} {token_strip(timeline, span_s, _STRIP_WIDTH)}")


def reading(scenario: Scenario, off: Timeline, on: Timeline) -> str:
    """Return the table as one sentence."""
    return (
        f"Chunking off, the document's {len(scenario.late.prompt_token_ids)} tokens ran in {_parts(off)} and a stream "
        f"waited up to {seconds(off.stall_s)} for its next token; chunking on, they ran in {_parts(on)} and it waited "
        f"up to {seconds(on.stall_s)}, while the document's first token came after {seconds(on.ttft_s)} instead of "
        f"{seconds(off.ttft_s)}."
    )


def _parts(timeline: Timeline) -> str:
    return f"{timeline.num_late_chunks} step{'s' if timeline.num_late_chunks > 1 else ''}"
