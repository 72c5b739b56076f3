"""The page about the interface names what there is."""

import re
from pathlib import Path

import pytest

from moesaic import EngineConfig
from moesaic.server.main import load_app
from moesaic.server.protocol import UNSUPPORTED, ChatCompletionRequest, CompletionRequest
from moesaic.server.settings import ServerConfig

PAGE = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def names(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def test_every_route_is_in_the_table(tiny_dir: Path) -> None:
    app, _ = load_app(str(tiny_dir), EngineConfig(device="cpu", num_kv_blocks=16), ServerConfig(ui=True))
    listed = set(re.findall(r"`(?:GET|POST) (/[^`]+)`", section("Routes")))
    assert listed == {*app.openapi()["paths"], "/openapi.json"}


def test_every_field_is_in_the_table() -> None:
    rows = [row.split("|") for row in section("Fields of a request").splitlines() if row.startswith("| `")]
    for request, where in ((CompletionRequest, "completions"), (ChatCompletionRequest, "chat")):
        listed = set().union(*(names(row[1]) for row in rows if row[2].strip() in ("both", where)))
        assert listed == set(request.model_fields)


def test_every_field_that_is_refused_is_named() -> None:
    paragraph = section("Fields of a request").split("refused by name:")[1].split(". A value")[0]
    assert names(paragraph) == set(UNSUPPORTED)


def test_the_examples_run_one_after_the_other(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) >= 2
    scope: dict[str, object] = {}
    for example in examples:
        exec(example.replace("http://127.0.0.1:8000", server_url), scope)
        assert capsys.readouterr().out
    scope["client"].close()  # type: ignore[attr-defined]  # an object of the examples' own
