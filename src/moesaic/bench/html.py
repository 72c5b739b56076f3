"""A recording as one HTML file that needs no network: tables, and charts as inline SVG."""

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path

from moesaic.bench.events import ArmRun, Recording, StepColumn, percentile
from moesaic.bench.figures import ROLES, values
from moesaic.bench.summary import HEAD, RUN_HEAD, difference_rows, distribution_rows, remarks, run_rows
from moesaic.bench.svg import COLOURS, DASHES, Chart

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:1180px;margin:1.5rem auto;padding:0 1rem;color:#1a1a1a}
table{border-collapse:collapse;margin:.5rem 0 1rem}caption{text-align:left}
td,th{padding:.2rem .7rem;border-bottom:1px solid #ccc;text-align:right}
td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}
svg{width:100%;height:auto}svg text{font:12px system-ui,sans-serif}
figure{margin:0 0 1.5rem;break-inside:avoid}figcaption{font-size:14px}.grid{stroke:#e2e2e2}.axis{stroke:#333;fill:none}
.scroll{overflow-x:auto}pre{white-space:pre-wrap;overflow-wrap:anywhere}
@media print{body{margin:0;max-width:none;font-size:11px}}
"""


def write_html(path: Path, recording: Recording) -> None:
    """Write the report to ``path``; a folder that does not exist is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html(recording), encoding="utf-8")


def html(recording: Recording) -> str:
    """Return the page."""
    title = f"Moesaic: {recording.settings['model']}, {recording.settings['load']['workload']}"
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(text)}</p>" for text in remarks(recording))]
    body += _tables(recording)
    body += _ladders(recording) + _cdfs(recording) + _frontier(recording) + _steps(recording)
    body.append(f"<h2>Settings</h2><pre>{escape(json.dumps(recording.settings, indent=1))}</pre>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _tables(recording: Recording) -> list[str]:
    parts = []
    for role, title in ROLES.items():
        if rows := distribution_rows(recording, role):
            parts += [f"<h2>{title.capitalize()}</h2>", _table(f"Milliseconds, {title}", HEAD, rows)]
    if rows := difference_rows(recording):
        head = ("what", "candidate", "p50", "p99", "max")
        caption = f"Candidate minus {recording.arms[0]}, ms: median (range) over pairs"
        parts += ["<h2>Differences</h2>", _table(caption, head, rows)]
    return [*parts, "<h2>Runs</h2>", _table("Median (range) over runs", RUN_HEAD, run_rows(recording))]


def _table(caption: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    # A region that scrolls must be reachable by keyboard.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _figure(chart: Chart, caption: str) -> str:
    return f"<figure>{chart.text()}<figcaption>{escape(caption)}</figcaption></figure>"


def _ladders(recording: Recording) -> list[str]:
    """Tokens over time of the first run of each arm, on common axes."""
    firsts = [recording.of(arm)[0] for arm in recording.arms]
    end_s = max((t for run in firsts for r in run.requests for t in r.token_s), default=1.0)
    most = max((len(r.token_s) for run in firsts for r in run.requests), default=1)
    caption = (
        "One stair per running decoder; a level part is a gap between tokens. Shaded: from the arrival of a long "
        "prompt to its first token."
    )
    return ["<h2>Tokens of each stream over time</h2>"] + [
        f"<h3>{escape(run.arm)}, first pair</h3>" + _figure(_ladder(run, end_s, most), caption) for run in firsts
    ]


def _ladder(run: ArmRun, end_s: float, most: int) -> Chart:
    chart = Chart(
        title=f"Output tokens of each decoder over time, {run.arm}",
        x_label="time since the run began, s",
        y_label="output tokens",
        x_range=(0.0, end_s),
        y_range=(0.0, float(most)),
    )
    for request in run.requests:
        times = request.token_s
        if request.role == "long" and times:
            name = f"{request.request_id}: {request.num_prompt_tokens} prompt tokens"
            chart.box((request.arrival_s, times[0]), (0.0, float(most)), "#e0b000", name, 0.25)
    for i, request in enumerate(r for r in run.requests if r.role == "decoder"):
        points = [(at, float(n)) for n, at in enumerate(request.token_s, 1)]
        if points:
            chart.stairs(points, COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)], request.request_id)
    return chart


def _cdfs(recording: Recording) -> list[str]:
    parts = ["<h2>Distributions</h2>"]
    for role, metric, title in (
        ("decoder", "itl_s", "ITL of running decoders"),
        ("decoder", "stall_s", "Stall of running decoders"),
        ("long", "ttft_s", "TTFT of long prompts"),
    ):
        found = {arm: values(recording.of(arm), role, metric) for arm in recording.arms}
        if any(found.values()):
            parts += [f"<h3>{title}</h3>", _figure(_cdf(title, found), f"{_legend(found)} Marked: p50, p90, p99.")]
    return parts


def _legend(arms: Iterable[str]) -> str:
    names = {"": "solid", "6 3": "dashed", "2 3": "dotted", "8 3 2 3": "dash-dotted"}
    return "; ".join(f"{arm}: {names[DASHES[i % len(DASHES)]]}" for i, arm in enumerate(arms)) + "."


def _cdf(title: str, found: dict[str, list[float]]) -> Chart:
    every = [1e3 * v for vs in found.values() for v in vs]
    low = max(percentile(every, 0.01), max(every) / 1e4, 1e-3)  # tokens that came together have gaps near 0
    chart = Chart(
        title=f"Cumulative distribution: {title}",
        x_label=f"{title}, ms (logarithmic)",
        y_label="share of values, %",
        x_range=(low * 0.9, max(every) * 1.1),
        y_range=(0.0, 100.0),
        is_log=True,
    )
    for i, (arm, seconds) in enumerate(found.items()):
        ordered = sorted(max(1e3 * v, low) for v in seconds)
        if ordered:
            points = [(low * 0.9, 0.0), *((v, 100 * k / len(ordered)) for k, v in enumerate(ordered, 1))]
            chart.stairs(points, COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)], arm)
            for share in (0.5, 0.9, 0.99):
                value = percentile(ordered, share)
                chart.dot((value, 100 * share), COLOURS[i % len(COLOURS)], f"p{100 * share:g} {value:.1f}", i % 2 == 0)
    return chart


def _frontier(recording: Recording) -> list[str]:
    """TTFT of long prompts against the stall of decoders: one dot per arm, medians over all runs."""
    found = []
    for arm in recording.arms:
        stalls = values(recording.of(arm), "decoder", "stall_s")
        ttfts = values(recording.of(arm), "long", "ttft_s")
        if stalls and ttfts:
            found.append((arm, 1e3 * percentile(stalls, 0.99), 1e3 * percentile(ttfts, 0.5)))
    if not found:
        return []
    chart = Chart(
        title="TTFT of long prompts against the stall of running decoders",
        x_label="stall of running decoders, p99, ms",
        y_label="TTFT of long prompts, p50, ms",
        x_range=(0.0, 1.15 * max(x for _, x, _ in found)),
        y_range=(0.0, 1.15 * max(y for _, _, y in found)),
    )
    for i, (arm, stall, ttft) in enumerate(found):
        chart.dot((stall, ttft), COLOURS[i % len(COLOURS)], arm, i % 2 == 1)
    return [
        "<h2>TTFT and stall</h2>",
        _figure(chart, "One dot per arm; further left and further down is less waiting."),
    ]


def _steps(recording: Recording) -> list[str]:
    parts = []
    for arm, columns in recording.steps.items():
        if columns:
            parts.append(f"<h3>{escape(arm)}, last pair</h3>")
            parts.append(_figure(_tokens_of_steps(arm, columns), "Blue: decode rows. Other colours: prompt tokens."))
            if all(c.times_s for c in columns):
                parts.append(_figure(_durations(arm, columns), _DURATIONS))
            parts.append(_figure(_kv_of_steps(arm, columns), "KV blocks that computed tokens fill after each step."))
    return ["<h2>Steps</h2>", *parts] if parts else []


def _tokens_of_steps(arm: str, columns: tuple[StepColumn, ...]) -> Chart:
    most = max(c.decode_rows + sum(n for _, n in c.chunks) for c in columns)
    chart = _step_chart(f"Tokens of each step, {arm}", "tokens in the step", len(columns), most)
    requests = list(dict.fromkeys(name for c in columns for name, _ in c.chunks))
    for i, column in enumerate(columns):
        top = float(column.decode_rows)
        chart.box((i, i + 0.9), (0.0, top), COLOURS[0], f"step {i}: {column.decode_rows} decode rows")
        for name, num in column.chunks:
            colour = COLOURS[1 + requests.index(name) % (len(COLOURS) - 1)]
            chart.box((i, i + 0.9), (top, top + num), colour, f"step {i}: {num} prompt tokens of {name}")
            top += num
    return chart


_DURATIONS = (
    "How long each step took: planning, forward with sampling (the wait for the device included), and commit, stacked "
    "from below. The time between steps is not in it."
)


def _durations(arm: str, columns: tuple[StepColumn, ...]) -> Chart:
    """The three phases of each step; none is left out for being short."""
    chart = Chart(
        title=f"Duration of each step, {arm}",
        x_label="step",
        y_label="duration, ms",
        x_range=(0.0, float(len(columns))),
        y_range=(0.0, 1.05e3 * max(c.duration_s or 0.0 for c in columns)),
    )
    for i, column in enumerate(columns):
        low = 0.0
        for phase, colour, seconds in zip(_PHASES, COLOURS, (column.times_s or ())[1:], strict=False):
            high = low + 1e3 * seconds
            chart.box((i, i + 0.9), (low, high), colour, f"step {i}: {phase} {1e3 * seconds:.2f} ms")
            low = high
    return chart


_PHASES = ("planning", "forward", "commit")


def _kv_of_steps(arm: str, columns: tuple[StepColumn, ...]) -> Chart:
    most = max(c.kv_blocks for c in columns)
    chart = _step_chart(f"KV blocks after each step, {arm}", "KV blocks", len(columns), most)
    chart.stairs([(float(i), float(c.kv_blocks)) for i, c in enumerate(columns)], COLOURS[0], name="KV blocks")
    return chart


def _step_chart(title: str, y_label: str, num_steps: int, most: int) -> Chart:
    return Chart(
        title=title,
        x_label="step",
        y_label=y_label,
        x_range=(0.0, float(num_steps)),
        y_range=(0.0, 1.05 * max(most, 1)),
    )
