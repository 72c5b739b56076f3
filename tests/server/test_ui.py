"""The live page in a real browser, and the feed behind it."""

import asyncio
import http.client
import json
import re
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from moesaic import EngineConfig
from moesaic.engine.client import Submission
from moesaic.engine.core import EngineCore
from moesaic.engine.thread_client import ThreadEngineClient
from moesaic.errors import QueueFullError
from moesaic.models.files import load_tokenizer
from moesaic.models.loader import load_model
from moesaic.request import SamplingParams
from moesaic.server import page
from moesaic.server.main import load_app, startup_block
from moesaic.server.settings import ServerConfig
from moesaic.server.watch import MAX_WATCHERS, StepsReply, StepWatchers
from moesaic.testing.browser import Browser, chromium, find_chromium
from moesaic.testing.http import running

CONFIG = EngineConfig(device="cpu", num_kv_blocks=512, enable_chunked_prefill=True, prefill_chunk_size=64)
KEY = "sk-page"


@pytest.fixture(scope="module")
def url(tiny_dir: Path) -> Iterator[str]:
    settings = ServerConfig(ui=True, api_key=(KEY,), served_model_name=("tiny",))
    with running(load_app(str(tiny_dir), CONFIG, settings)[0]) as address:
        yield address


@pytest.fixture(scope="module")
def browser(url: str) -> Iterator[Browser]:
    """Ends before the server, which would wait for its feed. Without a Chromium nothing else can stand for it."""
    command = find_chromium()
    if command is None:
        pytest.skip("no Chromium on this machine")
    with chromium(command) as tab:
        yield tab


def opened(browser: Browser, url: str) -> Browser:
    """A fresh page that has its key and is connected."""
    browser.complaints.clear()
    browser.open(f"{url}/ui")
    browser.value(f"document.getElementById('key').value = {json.dumps(KEY)}")
    browser.wait_for("document.getElementById('link').textContent === 'connected'")
    return browser


def test_keys_alone_write_a_long_prompt_send_it_and_show_steps(browser: Browser, url: str) -> None:
    tab = opened(browser, url)
    tab.value("document.getElementById('streams').value = 2")
    tab.value("document.getElementById('max').value = 40")
    tab.value("document.getElementById('tokens').value = 300")
    tab.value("document.getElementById('start').focus()")
    tab.press("Enter", code=13, text="\r")
    tab.value("document.getElementById('fill').focus()")
    tab.press("Enter", code=13, text="\r")
    tab.wait_for("document.activeElement.id === 'send'")
    assert 280 <= tab.value("document.getElementById('message').value.length") <= 320  # a token is a byte or more
    tab.press("Enter", code=13, text="\r")
    tab.wait_for("streams.length === 3 && streams.every(s => s.end)")
    assert tab.value("streams.map(s => s.end).slice(1)") == ["length", "length"]
    tab.wait_for("state.latest >= 40 && parseInt(document.getElementById('count').textContent) > 0")
    assert tab.value("document.getElementById('lost').textContent") == "0"
    assert "largest gap of a stream" in tab.value("document.getElementById('steps').ariaLabel")
    assert tab.value("Math.max(...steps.flatMap(s => s.chunks.map(c => c[1])))") == 64
    pixels = "[...$('steps').getContext('2d').getImageData(0, 0, 1200, 280).data]"
    assert tab.value(f"{pixels}.some((value, i) => i % 4 === 3 && value === 255)")
    assert [c for c in tab.complaints if "401" not in c] == []  # the first look was without the key


def test_the_conversation_goes_on_and_text_of_the_model_stays_text(browser: Browser, url: str) -> None:
    tab = opened(browser, url)
    tab.value("document.getElementById('max').value = 4")
    tab.value("document.getElementById('message').focus()")
    tab.type("<img src=x onerror=alert(1)>")
    tab.press("Enter", code=13, ctrl=True)
    tab.wait_for("streams.length === 1 && streams[0].end !== '' && history.length !== 1")
    assert tab.value("document.querySelectorAll('#answers img').length") == 0
    assert tab.value("document.querySelector('#answers h3').textContent").startswith("<img src=x")
    assert tab.value("document.activeElement.id") == "message"


def test_a_refusal_is_shown_and_told(browser: Browser, url: str) -> None:
    tab = opened(browser, url)
    tab.value("document.getElementById('max').value = 10 ** 9")
    tab.value("document.getElementById('message').value = 'x'")
    tab.value("document.getElementById('form').requestSubmit()")
    tab.wait_for("streams.length === 1 && streams[0].end.startsWith('failed')")
    assert "failed" in tab.value("document.getElementById('status').textContent")


def test_tab_goes_through_the_page_in_the_order_of_reading(browser: Browser, url: str) -> None:
    tab = opened(browser, url)
    tab.value("document.activeElement.blur()")
    seen = []
    for _ in range(14):
        tab.press("Tab", code=9)
        seen.append(tab.value("document.activeElement.id || document.activeElement.tagName"))
    fields = ["message", "max", "temperature", "send", "stop", "keep", "streams", "start", "tokens", "fill"]
    assert seen == ["A", *fields, "SUMMARY", "key", "answers"]


def test_every_control_has_a_name_for_screen_readers(browser: Browser, url: str) -> None:
    tab = opened(browser, url)
    tab.value("document.getElementById('access').open = true")
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "spinbutton", "checkbox", "img", "image", "link"}
    found = [n for n in nodes if not n["ignored"] and n["role"]["value"] in roles]
    assert len(found) >= 13
    assert [n for n in found if not n.get("name", {}).get("value", "").strip()] == []


CONTRASTS = """(() => {
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => {
    const [r, g, b] = c.match(/[\\d.]+/g).map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const back = getComputedStyle(document.body).backgroundColor, probe = document.createElement("i");
  document.body.append(probe);
  const of = name => { probe.style.color = css(name); return ratio(getComputedStyle(probe).color, back); };
  return {text: ["--text", "--soft", "--accent", "--bad"].map(of),
    marks: ["--field", "--decode", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6"].map(of)};
})()"""


DRAWS_AT = """(at, i) => {
  const wait = requestAnimationFrame;
  requestAnimationFrame = () => 0;
  if (i === 0) drawn = -9999;
  frame(at);
  requestAnimationFrame = wait;
  return drawn === at;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_suffices_in_both_schemes(browser: Browser, url: str, scheme: str) -> None:
    """WCAG 2.2: 4.5 for text (1.4.3), 3 for marks and borders of fields (1.4.11)."""
    tab = opened(browser, url)
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    found = tab.value(CONTRASTS)
    assert min(found["text"]) >= 4.5
    assert min(found["marks"]) >= 3


def test_less_motion_draws_once_a_second_and_still_says_all(browser: Browser, url: str) -> None:
    tab = opened(browser, url)
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    assert tab.value(f"[1000, 1500, 1990, 2001].map({DRAWS_AT})") == [True, False, False, True]
    tab.wait_for("document.getElementById('running').textContent === '0'")
    tab.call("Emulation.setEmulatedMedia", features=[])


def test_the_page_is_self_contained_and_its_policy_admits_nothing_else(tiny_dir: Path) -> None:
    app, _ = load_app(str(tiny_dir), CONFIG, ServerConfig(ui=True))
    with TestClient(app) as client:
        reply = client.get("/ui")
    assert reply.headers["Content-Type"].startswith("text/html")
    assert not re.search(r"(src|href)=\"(?!data:,|#)", reply.text)
    assert not re.search(r"https?://", reply.text)
    policy = dict(rule.split(" ", 1) for rule in reply.headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["script-src"].startswith("'sha256-")
    assert "unsafe" not in reply.headers["Content-Security-Policy"]
    assert len(reply.content) < 32_000


def test_without_the_flag_there_is_no_page_and_no_feed(tiny_dir: Path) -> None:
    app, _ = load_app(str(tiny_dir), CONFIG)
    with TestClient(app) as client:
        assert client.get("/ui").status_code == client.get("/v1/steps").status_code == 404


def test_start_up_says_where_the_page_is() -> None:
    stats = {"max_model_len": 8, "kv_blocks_total": 1, "kv_block_size_tokens": 16, "kv_bytes": 1, "features": {}}
    assert page.PATH in startup_block("tiny", stats, "http://h:1", ServerConfig(ui=True))
    assert page.PATH not in startup_block("tiny", stats, "http://h:1", ServerConfig())


def test_the_feed_has_counts_and_times_and_nothing_of_a_request(url: str) -> None:
    host = url.removeprefix("http://")
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    feed = http.client.HTTPConnection(host, timeout=60)
    feed.request("GET", "/v1/steps", headers=headers)
    reply = feed.getresponse()
    first = json.loads(reply.readline().removeprefix(b"data: "))
    assert (first["steps"], first["kv_blocks_total"]) == ([], 512)

    def complete() -> None:
        asked = http.client.HTTPConnection(host, timeout=60)
        body = {"prompt": "secretsecret", "max_tokens": 3, "ignore_eos": True, "user": "somebody"}
        asked.request("POST", "/v1/completions", json.dumps(body), headers)
        assert asked.getresponse().status == 200
        asked.close()

    thread = threading.Thread(target=complete)
    thread.start()
    seen, steps = b"", []
    while sum(s["decode_rows"] for s in steps) < 2:
        line = reply.readline()
        seen += line
        if line.startswith(b"data: "):
            steps += json.loads(line.removeprefix(b"data: "))["steps"]
    thread.join()
    feed.close()
    assert b"secret" not in seen
    assert b"somebody" not in seen
    counts = {"number", "decode_rows", "chunks", "kv_blocks_used", "num_running", "num_waiting"}
    assert set(steps[0]) == counts | {"start_s", "plan_s", "launch_s", "commit_s", "largest_itl_s"}


def test_watchers_are_bounded_and_leave_their_place(tiny_dir: Path) -> None:
    async def body() -> None:
        client = ThreadEngineClient(EngineCore(load_model(tiny_dir), CONFIG), load_tokenizer(tiny_dir))
        await client.start()
        watchers = StepWatchers(client)
        async with AsyncExitStack() as stack:
            for _ in range(MAX_WATCHERS):
                await stack.enter_async_context(watchers.place())
            with pytest.raises(QueueFullError, match="8 clients"):
                async with watchers.place():
                    pass
        async with watchers.place(), aclosing(watchers.events()) as events:
            await _watch_one_request(client, events)
            client.drain()
            assert [event async for event in events] == []  # a server that stops waits for no watcher
        await client.close()

    asyncio.run(asyncio.wait_for(body(), 60))


async def _watch_one_request(client: ThreadEngineClient, events: AsyncGenerator[StepsReply, None]) -> None:
    """The first event has no past; those that follow have every step once."""
    assert (await anext(events)).steps == []
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    numbers: list[int] = []
    async with await client.submit(Submission(prompt_token_ids=(1, 2, 3), sampling_params=params)) as stream:
        reader: asyncio.Task[list[Any]] = asyncio.create_task(_all(stream))
        while len(numbers) < 4:
            event = await anext(events)
            numbers += [step.number for step in event.steps]
            assert event.num_lost == 0
        await reader
    assert numbers == [1, 2, 3, 4]


async def _all(stream: Any) -> list[Any]:
    return [delta async for delta in stream]
