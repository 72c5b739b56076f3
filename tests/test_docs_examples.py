"""What the pages show is what there is: examples run, flags and messages exist, and the site has every page."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from moesaic.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
SHELL = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
OTHERS_FLAGS = {"--build-arg", "--no-deps"}
"""Of pip."""


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def commands() -> list[str]:
    """Every line that begins with our own command, on any page; those that go on in the next line are one."""
    blocks = [block for page in PAGES for block in SHELL.findall(page.read_text(encoding="utf-8"))]
    lines = [line.removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return sorted({line for line in lines if line.startswith("moesaic ")})


def test_the_example_of_the_quickstart_runs(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOESAIC_CACHE", str(tiny_dir.parents[1]))
    (example,) = re.findall(r"```python\n(.*?)```", text_of("quickstart.md"), re.DOTALL)
    exec(example, {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(("length (", "stop (")) for line in lines)


def test_the_plan_of_the_quickstart_is_printed(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_CACHE", str(tiny_dir.parents[1]))
    (line,) = re.findall(r"^moesaic (plan .*)$", text_of("quickstart.md"), re.MULTILINE)
    done = CliRunner().invoke(app, shlex.split(line), catch_exceptions=False)
    assert "room for" in done.output


@pytest.mark.parametrize("line", commands())
def test_a_command_on_a_page_has_only_flags_that_exist(line: str) -> None:
    command: Any = get_command(app)  # Any: click's, vendored by typer
    words = shlex.split(line.split("#")[0])[1:]
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    known = {option for p in command.params for option in (*p.opts, *p.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known


def test_every_flag_that_a_page_names_exists() -> None:
    def options(command: Any) -> set[str]:
        own = {option for p in command.params for option in (*p.opts, *p.secondary_opts)}
        return own.union(*(options(c) for c in getattr(command, "commands", {}).values()))

    known = options(get_command(app)) | OTHERS_FLAGS
    for page in PAGES:
        if page.name == "comparison.md":  # names those of other servers
            continue
        named = set(re.findall(r"`(--[a-z][a-z-]+)", page.read_text(encoding="utf-8")))
        assert named - known == set(), page.name


def test_a_message_under_troubleshooting_is_one_that_we_give() -> None:
    table = text_of("troubleshooting.md").split("## It does not start")[1].split("\n## ")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(messages) >= 5
    source = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)  # texts that go on in the next line
    assert [m for m in messages if m not in joined] == []


def test_a_metric_that_a_page_names_exists() -> None:
    from moesaic.server.metrics import METRICS

    known = {spec.full_name for spec in METRICS}
    for page in PAGES:
        named = set(re.findall(r"`(moesaic_[a-z_]+)`", page.read_text(encoding="utf-8")))
        assert named - known == set(), page.name


def test_the_site_lists_every_page() -> None:
    listed = {
        entry
        for block in re.findall(r"```{toctree}\n(.*?)```", text_of("index.md"), re.DOTALL)
        for entry in block.split()
    }
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert pages - listed == {"index"}
