import io

from rich.console import Console

from moesaic.bench.progress import StageProgress


def _lines(*calls: tuple[str, float], is_terminal: bool = False) -> str:
    out = io.StringIO()
    with StageProgress(Console(file=out, width=80, force_terminal=is_terminal)) as progress:
        for stage, share in calls:
            progress(stage, share)
    return out.getvalue()


def test_a_file_gets_one_plain_line_per_stage_and_quarter() -> None:
    shares = [i / 100 for i in range(101)]
    text = _lines(*(("load", s) for s in shares), ("run", 0.0))
    said = [line.partition("] ")[2] for line in text.splitlines()]
    assert said == ["load", "load: 25%", "load: 50%", "load: 75%", "run"]
    assert "\x1b" not in text


def test_a_terminal_gets_a_bar_per_stage() -> None:
    text = _lines(("load", 0.5), ("run", 0.1), is_terminal=True)
    assert "load" in text
    assert "run" in text
    assert "\x1b" in text
