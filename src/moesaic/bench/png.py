"""The ladders of a recording as a PNG for documents."""

from pathlib import Path

from moesaic.bench.events import Recording
from moesaic.errors import MoesaicError


def write_png(path: Path, recording: Recording) -> None:
    """Write one panel per arm: output tokens of each decoder over time, the long prompts' windows shaded.

    Raises: ``MoesaicError`` without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MoesaicError("a PNG needs matplotlib; install moesaic[bench]") from error
    arms = recording.arms
    figure = Figure(figsize=(10, 3 * len(arms)), layout="constrained")
    for axes, arm in zip(figure.subplots(len(arms), sharex=True, squeeze=False)[:, 0], arms, strict=True):
        for request in recording.of(arm)[0].requests:
            times = request.token_s
            if request.role == "decoder" and times:
                axes.step(times, range(1, len(times) + 1), where="post", linewidth=1)
            elif times:
                axes.axvspan(request.arrival_s, times[0], color="#e0b000", alpha=0.25)
        axes.set(title=arm, ylabel="output tokens", xlabel="time since the run began, s")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
