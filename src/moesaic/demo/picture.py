"""Both runs of the demonstration as a recording, which the report is made from."""

from dataclasses import asdict

from moesaic.bench.events import ArmRun, Recording, RequestEvents
from moesaic.bench.report import environment
from moesaic.bench.timeline import Ask, Timeline, TokenTimes
from moesaic.demo.run import DemoRuns


def as_recording(runs: DemoRuns) -> Recording:
    """Return one pair: chunking off, then on."""
    size = runs.settings.chunk_size
    arms = {"chunking off": runs.off, f"chunking on, {size} tokens": runs.on}
    settings = {
        **asdict(runs.settings),
        "load": {"workload": "demonstration", "seed": None},
        "num_pairs": 1,
        "prompts": "text",
        "max_ttft_s": 60.0,
        "max_stall_s": 1.0,
    }
    asks = {ask.request_id: ask for ask in runs.scenario.asks}
    return Recording(
        settings=settings,
        environment=environment(),
        runs=tuple(_arm_run(name, timeline, asks) for name, timeline in arms.items()),
    )


def _arm_run(name: str, timeline: Timeline, asks: dict[str, Ask]) -> ArmRun:
    started_s = timeline.started_s
    streams = [_events(times, "decoder", started_s, asks) for times in timeline.streams]
    return ArmRun(
        pair=0,
        arm=name,
        requests=(*streams, _events(timeline.late, "long", started_s, asks)),
        duration_s=timeline.ended_s - started_s,
    )


def _events(times: TokenTimes, role: str, started_s: float, asks: dict[str, Ask]) -> RequestEvents:
    return RequestEvents(
        request_id=times.request_id,
        role=role,
        arrival_s=times.arrival_s - started_s,
        chunks=tuple((at - started_s, 1) for at in times.token_s),
        token_ids=times.token_ids,
        num_prompt_tokens=len(asks[times.request_id].prompt_token_ids),
    )
