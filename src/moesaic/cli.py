"""The command line. Engine flags are made from the fields of ``EngineConfig``."""

import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.config import ConfigField, EngineConfig, config_fields
from moesaic.errors import MoesaicError
from moesaic.server.settings import ServerConfig

if TYPE_CHECKING:
    from rich.console import Console

    from moesaic.bench.events import Recording
    from moesaic.bench.run import Bench

app = typer.Typer(
    name="moesaic",
    help="Serve mixture-of-experts models; long prompts never freeze the running streams.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ModelArgument = Annotated[str, typer.Argument(help="A local directory, a hub id, or built in: smol, tiny.")]


@app.callback()
def _options() -> None:
    """Serve mixture-of-experts models; long prompts never freeze the running streams."""


def with_flags(**settings: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command one flag per field of each settings class.

    The command gets the settings themselves, under the keyword that names their class here.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.name not in settings]
        flags = [_parameter(f, keyword) for keyword, kind in settings.items() for f in config_fields(kind)]

        def run(**values: Any) -> None:  # Any: typer has parsed each by its own annotation
            made = {keyword: _settings(kind, values) for keyword, kind in settings.items()}
            command(**values, **made)

        run.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]  # typer reads it
        run.__doc__, run.__name__ = command.__doc__, command.__name__
        return run

    return decorate


def _settings(kind: type, values: dict[str, Any]) -> Any:
    """Take the fields of a settings class out of ``values`` and return the settings."""
    fields = {f.name: values.pop(f.name) for f in config_fields(kind)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def _parameter(field: ConfigField, panel: str) -> inspect.Parameter:
    names = [field.flag, f"--no-{field.flag[2:]}"] if field.hint is bool else [field.flag]
    flag = "/".join(names)
    choices = field.choices
    help_text = f"{field.help} One of: {', '.join(choices)}." if choices else field.help
    option = typer.Option(flag, help=help_text, envvar=field.variable, rich_help_panel=panel.capitalize())
    hint: Any = list[str] if field.is_repeatable else str if choices else field.hint
    default = list(field.default) if field.is_repeatable else field.default
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option]
    )


@app.command()
@with_flags(engine=EngineConfig)
def generate(
    model: ModelArgument,
    prompt: Annotated[list[str], typer.Argument(help="One or more prompts.")],
    *,
    max_tokens: Annotated[int, typer.Option(help="Most output tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Render prompts with the chat template.")] = False,
    engine: EngineConfig,
) -> None:
    """Answer prompts and print the answers."""
    import dataclasses

    from moesaic.engine.llm import LLM
    from moesaic.request import SamplingParams

    llm = LLM(model, **{f.name: getattr(engine, f.name) for f in dataclasses.fields(engine)})
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    inputs = [llm.render_chat([{"role": "user", "content": p}]) for p in prompt] if chat else prompt
    for text, output in zip(prompt, llm.generate(inputs, params), strict=True):
        typer.echo(f"{text}\n  -> {output.text} [{output.finish_reason}, {len(output.token_ids)} tokens]")


@app.command()
@with_flags(server=ServerConfig, engine=EngineConfig)
def serve(model: ModelArgument, *, server: ServerConfig, engine: EngineConfig) -> None:
    """Serve a model over HTTP, as OpenAI's API does."""
    from moesaic.server.main import serve as run_server

    raise typer.Exit(run_server(model, engine, server))


@app.command()
def chat(
    url: Annotated[str, typer.Argument(help="Address of a server, like http://127.0.0.1:8000.")],
    *,
    model: Annotated[str | None, typer.Option(help="The default is the server's first model.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most output tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy; the server has a default.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="MOESAIC_API_KEY", help="Key of the server.")] = None,
) -> None:
    """Talk with a model on any server of OpenAI's API; without a terminal, each line of the input is a question."""
    from moesaic.terminal import HELP, ChatError, ChatServer, Conversation, talk

    server = ChatServer(url=url, api_key=api_key)
    names = [model] if model is not None else server.models()
    if not names:
        raise ChatError(f"{url} has no model; name one with --model")
    settings = _given(max_tokens=max_tokens, temperature=temperature)
    conversation = Conversation(server=server, model=names[0], system=system, settings=settings)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        typer.echo(f"{names[0]} at {url}. {HELP}")
    read = partial(input, "> " if is_terminal else "")
    talk(conversation, read, partial(typer.echo, nl=False), keeps_going=is_terminal)


@app.command()
@with_flags(engine=EngineConfig)
def plan(model: ModelArgument, *, engine: EngineConfig) -> None:
    """Print what a model and its KV cache would take on this machine, without loading weights."""
    from moesaic.engine.model_plan import plan_block, plan_model
    from moesaic.models.files import resolve_model_path

    typer.echo(plan_block(model, plan_model(resolve_model_path(model, with_weights=False), engine)))


@app.command()
def tune(
    model: ModelArgument,
    *,
    output: Annotated[Path | None, typer.Option(help="Folder of the table; the default is where it is read.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Tokens in a step; repeatable, ascending.")] = None,
) -> None:
    """Measure the expert kernels for a model's shapes on this GPU and write the table that serving reads."""
    from rich.console import Console

    from moesaic.bench.progress import StageProgress

    with StageProgress(Console()) as progress:
        progress("load PyTorch", 0.0)
        from moesaic.experts.tuner import TOKENS, tune_model
        from moesaic.experts.tuning import tuned_folder
        from moesaic.models.files import resolve_model_path

        found = tune_model(resolve_model_path(model, with_weights=False), tokens or TOKENS, progress)
        paths = [tuning.write(output or tuned_folder()) for tuning in found]
    for tuning, path in zip(found, paths, strict=True):
        typer.echo(f"{tuning.text()}\nwritten to {path}")


@app.command()
def replay(file: Annotated[Path, typer.Argument(help="A file that --decision-log made.")]) -> None:
    """Make the scheduling decisions of a recorded run again, and exit with 1 if one differs."""
    from moesaic.sched.replay import replay as run_replay

    result = run_replay(file)
    typer.echo(f"{result.num_steps} steps and {result.num_commands} commands replayed")
    if result.is_truncated:
        typer.echo("the last line is cut off, as a crash leaves it; it was left out")
    typer.echo("no difference" if result.first_difference is None else f"first difference: {result.first_difference}")
    if result.first_difference is not None:
        raise typer.Exit(1)


@app.command()
def trace(
    source: Annotated[str, typer.Argument(help="A server's URL, events of bench paired (.jsonl), or a decision log.")],
    *,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to watch a server.")] = 10.0,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("moesaic-trace.json"),
    api_key: Annotated[str | None, typer.Option(envvar="MOESAIC_API_KEY", help="Key of the server.")] = None,
) -> None:
    """Write the steps of a server that runs with --ui, or of a recording, for ui.perfetto.dev."""
    from moesaic.bench.trace import trace_events, trace_of_file, watch_steps, write_trace

    if "://" in source:
        from rich.console import Console

        from moesaic.bench.progress import StageProgress

        with StageProgress(Console(stderr=True)) as progress:
            steps, num_lost = watch_steps(source, seconds, api_key, lambda share: progress(f"watch {source}", share))
        write_trace(out, trace_events({source: steps}))
        typer.echo(f"{len(steps)} steps written to {out}, {num_lost} lost")
    else:
        found = trace_of_file(Path(source))
        write_trace(out, found)
        num_steps = sum(e["ph"] == "X" and e["name"].startswith("step ") for e in found["traceEvents"])
        typer.echo(f"{num_steps} steps written to {out}")


@app.command()
def demo(
    *,
    model: Annotated[str, typer.Option(help="smol, tiny, or another chat model.")] = "smol",
    streams: Annotated[int, typer.Option(help="Chat streams that run when the document arrives.")] = 6,
    max_tokens: Annotated[int, typer.Option(help="Most output tokens of each stream.")] = 40,
    chunk_size: Annotated[int, typer.Option(help="Most document tokens in one step when chunking is on.")] = 128,
    report: Annotated[Path, typer.Option(help="Where the report with the pictures goes.")] = Path("moesaic-demo.html"),
) -> None:
    """Run chat streams and a long document on this machine's CPU, with chunked prefill off and on."""
    from rich.console import Console

    from moesaic.bench.progress import StageProgress

    console = Console()
    with StageProgress(console) as progress:
        progress("load PyTorch", 0.0)
        from moesaic.bench.html import write_html
        from moesaic.demo.picture import as_recording
        from moesaic.demo.run import run_demo
        from moesaic.demo.scene import DemoSettings
        from moesaic.demo.show import show_runs

        settings = DemoSettings(model=model, num_streams=streams, max_tokens=max_tokens, chunk_size=chunk_size)
        runs = run_demo(settings, progress)
    show_runs(runs, console)
    write_html(report, as_recording(runs))
    console.print("\nPictures of both runs, to open in a browser:")
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)


bench_app = typer.Typer(help="Benchmarks; without a name, those of this machine's CPU in turn.")
app.add_typer(bench_app, name="bench", invoke_without_command=True)

JsonOption = Annotated[Path | None, typer.Option("--json", help="Write settings and every sample to this file.")]
PairsOption = Annotated[int | None, typer.Option("--pairs", min=1, help="Runs of each arm, in turns.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Threads of every arm; the default is PyTorch's.")]


@bench_app.callback()
def bench(context: typer.Context, *, json: JsonOption = None, threads: ThreadsOption = None) -> None:
    """Measure on this machine's CPU; without a command, everything in turn."""
    if context.invoked_subcommand is not None:
        return

    def all_benches() -> list["Bench"]:
        from moesaic.bench.offline import OfflineSettings, run_offline
        from moesaic.bench.planner import PlannerSettings, run_planner
        from moesaic.bench.stall import StallSettings, run_stall

        return [
            partial(run_planner, PlannerSettings()),
            partial(run_offline, OfflineSettings.for_model("tiny")),
            partial(run_offline, OfflineSettings.for_model("smol")),
            partial(run_stall, StallSettings()),
        ]

    _run_benches(all_benches, json, threads)


@bench_app.command("offline")
def bench_offline(
    *,
    model: Annotated[list[str] | None, typer.Option(help="Repeatable; the default is tiny and smol.")] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Prompts, of 1 to 300 tokens each.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Output tokens of each prompt.")] = None,
    max_tokens_per_step: Annotated[int | None, typer.Option(help="Token budget of one step, in both arms.")] = None,
    pairs: PairsOption = None,
    threads: ThreadsOption = None,
    json: JsonOption = None,
) -> None:
    """Compare offline throughput with transformers' own continuous batching."""

    def benches() -> list["Bench"]:
        from moesaic.bench.offline import OfflineSettings, run_offline

        changes = _given(
            num_prompts=num_prompts, max_tokens=max_tokens, max_tokens_per_step=max_tokens_per_step, num_pairs=pairs
        )
        names = model or ["tiny", "smol"]
        return [partial(run_offline, OfflineSettings.for_model(name, **changes)) for name in names]

    _run_benches(benches, json, threads)


@bench_app.command("stall")
def bench_stall(
    *,
    model: Annotated[str, typer.Option(help="smol, tiny, a directory or a hub id.")] = "smol",
    streams: Annotated[int | None, typer.Option(min=1, help="Streams that run when the prompt arrives.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Length of the prompt that arrives.")] = None,
    chunk_size: Annotated[int | None, typer.Option(help="prefill_chunk_size when chunking is on.")] = None,
    pairs: PairsOption = None,
    threads: ThreadsOption = None,
    json: JsonOption = None,
) -> None:
    """Measure the stall of running streams when a long prompt arrives, with chunking off and on."""

    def benches() -> list["Bench"]:
        from moesaic.bench.stall import StallSettings, run_stall

        changes = _given(num_streams=streams, prompt_tokens=prompt_tokens, chunk_size=chunk_size, num_pairs=pairs)
        return [partial(run_stall, StallSettings(model=model, **changes))]

    _run_benches(benches, json, threads)


@bench_app.command("planner")
def bench_planner(
    *,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Decode rows in a step; repeatable.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Measured steps for each number of rows.")] = None,
    json: JsonOption = None,
) -> None:
    """Measure planning and commit of a step, without any model."""

    def benches() -> list["Bench"]:
        from moesaic.bench.planner import PlannerSettings, run_planner

        changes = _given(num_decode_rows=tuple(rows) if rows else None, num_steps=steps)
        return [partial(run_planner, PlannerSettings(**changes))]

    _run_benches(benches, json, None)


@bench_app.command("server")
def bench_server(
    *,
    streams: Annotated[int | None, typer.Option(min=1, help="Streams at once.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Output tokens of each stream.")] = None,
    step_ms: Annotated[float | None, typer.Option(min=0.0, help="What a forward takes; nothing is computed.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask for chats instead of completions.")] = False,
    pairs: PairsOption = None,
    json: JsonOption = None,
) -> None:
    """Compare tokens/s through HTTP with those of the engine alone, on a forward that only takes time."""

    def benches() -> list["Bench"]:
        from moesaic.bench.overhead import OverheadSettings, run_overhead

        changes = _given(num_streams=streams, max_tokens=max_tokens, step_ms=step_ms, num_pairs=pairs)
        return [partial(run_overhead, OverheadSettings(chat=chat, **changes))]

    _run_benches(benches, json, None)


@bench_app.command("pressure")
def bench_pressure(
    *,
    hours: Annotated[float | None, typer.Option(min=0.001, help="Hours of simulated arrivals.")] = None,
    requests_per_s: Annotated[float | None, typer.Option(min=0.001, help="Arrivals per simulated second.")] = None,
    json: JsonOption = None,
) -> None:
    """Simulate traffic on a small KV pool: tokens computed again, by choice of victims and with swap."""

    def benches() -> list["Bench"]:
        from moesaic.bench.pressure import PressureSettings, run_pressure

        return [partial(run_pressure, PressureSettings(**_given(hours=hours, requests_per_s=requests_per_s)))]

    _run_benches(benches, json, None)


@bench_app.command("engine")
@with_flags(engine=EngineConfig)
def bench_engine(
    model: ModelArgument,
    *,
    workloads: Annotated[str, typer.Option(help="Of decode, stall, offline; with commas.")] = "decode,stall,offline",
    budgets: Annotated[
        str | None, typer.Option(help="Like 512,2048: chunked prefill with these tokens a step, one after the other.")
    ] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Decode rows; repeatable.")] = None,
    streams: Annotated[int | None, typer.Option(min=1, help="Streams that run when the long prompts arrive.")] = None,
    long_prompts: Annotated[int | None, typer.Option(min=1, help="Long prompts that arrive.")] = None,
    long_gap_s: Annotated[float | None, typer.Option(min=0.0, help="Seconds between their arrivals.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests of the offline load.")] = None,
    length_divisor: Annotated[int | None, typer.Option(min=1, help="Divides all lengths, for small machines.")] = None,
    threads: ThreadsOption = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write figures here, and events beside it as .jsonl.")
    ] = None,
    engine: EngineConfig,
) -> None:
    """Measure one engine in this process: decode steps, stalls by long prompts, offline throughput, start-up."""

    def benches() -> list["Bench"]:
        from moesaic.bench.engine import EngineBench, with_budget
        from moesaic.bench.engine_load import EngineLoads

        loads = EngineLoads(
            loads=tuple(workloads.split(",")),
            **_given(
                decode_rows=tuple(rows) if rows else None,
                num_streams=streams,
                num_long=long_prompts,
                long_gap_s=long_gap_s,
                num_offline=requests,
                length_divisor=length_divisor,
            ),
        )
        configs = [with_budget(engine, n) for n in _numbers(budgets, "budgets")] if budgets else [engine]
        measured = EngineBench(model, loads, None if json is None else json.with_suffix(".jsonl"))
        return [partial(measured.run, config) for config in configs]

    _run_benches(benches, json, threads)


@bench_app.command("paired")
def bench_paired(
    model: ModelArgument,
    *,
    workload: Annotated[
        str, typer.Option(help="stall, head-of-line, conversation, code, agent, churn or pressure.")
    ] = "stall",
    arm_a: Annotated[str | None, typer.Option(help='Flags of the baseline, in quotes: "--max-batch-size 8".')] = None,
    arm_b: Annotated[str | None, typer.Option(help="Flags of the candidate.")] = None,
    url_a: Annotated[str | None, typer.Option(help="A running server instead of one that is started here.")] = None,
    url_b: Annotated[str | None, typer.Option(help="The same for the candidate.")] = None,
    model_a: Annotated[str | None, typer.Option(help="What arm A calls the model; the default is MODEL.")] = None,
    model_b: Annotated[str | None, typer.Option(help="What arm B calls it.")] = None,
    chunk_sizes: Annotated[
        str | None, typer.Option(help="Like 64,128,256: chunking off, and one arm for each of these.")
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Measured runs of each arm, in turns.")] = 3,
    streams: Annotated[int | None, typer.Option(min=1, help="Decoders, or short requests behind the long one.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Length of the long prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Output tokens of a decoder; the most of all.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests of a trace's workload.")] = None,
    length_divisor: Annotated[int | None, typer.Option(min=1, help="Divides the lengths of a trace.")] = None,
    arrivals: Annotated[str | None, typer.Option(help="trace, poisson or bursty.")] = None,
    rate: Annotated[float | None, typer.Option(help="Mean arrivals per second.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of lengths, prompts and arrivals.")] = None,
    max_ttft_s: Annotated[float, typer.Option(help="Goodput: most seconds to the first token.")] = 2.0,
    max_stall_s: Annotated[float, typer.Option(help="Goodput: longest gap in seconds.")] = 0.2,
    pause_idle: Annotated[
        bool,
        typer.Option("--pause-idle", help="Stop (SIGSTOP) the other servers of this machine while one is measured."),
    ] = False,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write figures here, and events beside it as .jsonl.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the HTML report here.")] = None,
) -> None:
    """Put two servers under the same load in turns; the default arms are chunked prefill off and on."""
    from rich.console import Console

    from moesaic.bench.progress import StageProgress

    console = Console()
    with StageProgress(console) as progress:
        if importlib.util.find_spec("httpx2") is None:
            raise MoesaicError("bench paired asks servers with httpx2, which is not there; install moesaic[bench]")
        progress("load PyTorch", 0.0)
        from moesaic.bench.comparison import ArmSettings, ComparisonSettings, chunking_arms, run_comparison
        from moesaic.bench.load import LoadSettings

        sizes = _numbers(chunk_sizes, "chunk sizes") if chunk_sizes else (128,)
        off, on, *more = chunking_arms(model, sizes)
        own = {"A": (off, arm_a, url_a, model_a), "B": (on, arm_b, url_b, model_b)}
        arms = [
            usual
            if flags is None and url is None
            else ArmSettings(name=f"{name}: {flags or url}", model=as_model or model, flags=_split(flags), url=url)
            for name, (usual, flags, url, as_model) in own.items()
        ]
        load = LoadSettings(
            workload=workload,  # type: ignore[arg-type]  # the settings check it
            **_given(
                num_streams=streams,
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                num_requests=requests,
                length_divisor=length_divisor,
                arrivals=arrivals,
                rate_per_s=rate,
                seed=seed,
            ),
        )
        settings = ComparisonSettings(
            model=model,
            arms=(*arms, *more),
            load=load,
            num_pairs=pairs,
            max_ttft_s=max_ttft_s,
            max_stall_s=max_stall_s,
            pause_idle=pause_idle,
        )
        recording = run_comparison(settings, progress)
    _keep(recording, console, json, report, None)


@bench_app.command("report")
def bench_report(
    files: Annotated[list[Path], typer.Argument(help="Events (.jsonl) that bench paired wrote.")],
    *,
    html: Annotated[Path | None, typer.Option(help="Write the HTML report of the (one) file here.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the ladders of the (one) file here.")] = None,
) -> None:
    """Make tables and pictures of recorded events again."""
    from rich.console import Console

    from moesaic.bench.events import read_events
    from moesaic.errors import ConfigError

    if len(files) > 1 and (html or png):
        raise ConfigError(f"there are {len(files)} files but one picture to write; pass one file at a time")
    for file in files:
        _keep(read_events(file), Console(), None, html, png)


def _numbers(text: str, name: str) -> tuple[int, ...]:
    from moesaic.errors import ConfigError

    try:
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        raise ConfigError(f"{name} are {text!r}; give whole numbers with commas, like 64,128,256") from error


def _split(flags: str | None) -> tuple[str, ...]:
    import shlex

    return tuple(shlex.split(flags or ""))


def _keep(recording: "Recording", console: "Console", json: Path | None, html: Path | None, png: Path | None) -> None:
    """Print a recording and write the files that were asked for."""
    import json as json_library

    from moesaic.bench.events import write_events
    from moesaic.bench.html import write_html
    from moesaic.bench.summary import as_json, show_summary

    show_summary(recording, console)
    if json is not None:
        write_events(json.with_suffix(".jsonl"), recording)
        json.write_text(json_library.dumps(as_json(recording), indent=1) + "\n", encoding="utf-8")
    if html is not None:
        write_html(html, recording)
    if png is not None:
        from moesaic.bench.png import write_png

        write_png(png, recording)


def _given(**options: Any) -> dict[str, Any]:  # Any: fields of settings, each of its own type
    """Return the options that were given; defaults are those of the settings."""
    return {name: value for name, value in options.items() if value is not None}


def _run_benches(benches: Callable[[], Iterable["Bench"]], json: Path | None, threads: int | None) -> None:
    """Run what ``benches`` returns; it is called once something is on the screen, as its imports take seconds."""
    from rich.console import Console

    from moesaic.bench.progress import StageProgress

    console = Console()
    with StageProgress(console) as progress:
        progress("load PyTorch", 0.0)
        from moesaic.bench.run import run_benches

        chosen = benches()
    run_benches(chosen, console, num_threads=threads, json_file=json)


def main() -> None:
    """Run the command line; an error that Moesaic raises on purpose is one readable block and exit code 1."""
    logging.basicConfig(
        level=os.environ.get("MOESAIC_LOG_LEVEL", "WARNING").upper(), format="%(levelname)s %(message)s"
    )
    try:
        app()
    except MoesaicError as error:
        typer.secho(f"{type(error).__name__}: {error}", fg="red", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
