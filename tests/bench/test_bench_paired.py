"""``bench paired`` through real servers, as small as it goes; and a server of another kind."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moesaic.bench.client import Dialect, Target, find_dialect, run_load
from moesaic.bench.load import Call
from moesaic.cli import app


def test_chunking_off_and_on_give_equal_outputs_raw_data_and_a_report(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESAIC_CACHE", str(tiny_dir.parents[1]))
    out, page = tmp_path / "out.json", tmp_path / "r.html"
    arguments = [
        "--workload",
        "stall",
        "--streams",
        "2",
        "--prompt-tokens",
        "300",
        "--max-tokens",
        "12",
        "--pairs",
        "1",
        "--pause-idle",
    ]
    done = CliRunner().invoke(
        app, ["bench", "paired", "tiny", *arguments, "--json", str(out), "--report", str(page)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["parity"] is True
    assert [run["arm"] for run in found["raw"]] == ["chunking off", "chunking on, 128 tokens"]
    assert all(run["peak_kv_blocks"] is not None for run in found["raw"])
    assert found["arms"]["chunking off"]["decoder"]["itl_s"]["n"] == 2 * 11
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"http", text)
    assert text.count("<svg") >= 9
    assert "128 prompt tokens of long" in text  # a chunk in the picture of the steps
    assert text.count("duration, ms</text>") == 2  # an axis for each arm
    assert re.search(r"step 0: forward \d+\.\d\d ms", text)

    again = tmp_path / "again.html"
    done = CliRunner().invoke(
        app, ["bench", "report", str(out.with_suffix(".jsonl")), "--html", str(again)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    assert again.read_text(encoding="utf-8") == text


async def _plain_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Takes texts and OpenAI's own fields only, tells no usage, and ends streams without ``[DONE]``."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    size = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
    body = json.loads(await reader.readexactly(int(size[1]))) if size else {}
    if not head.startswith("POST /v1/completions"):
        reply, status = b"{}", b"404 Not Found"
    elif not isinstance(body["prompt"], str) or "ignore_eos" in body:
        reply, status = b'{"detail": "no"}', b"422 Unprocessable Entity"
    else:
        part = json.dumps({"choices": [{"index": 0, "text": "x"}]}).encode()
        reply, status = b": ping\n\n" + b"".join(b"data: " + part + b"\n\n" for _ in range(3)), b"200 OK"
    writer.write(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\n\r\n" + reply)
    await writer.drain()
    writer.close()
    await writer.wait_closed()


def test_a_server_without_usage_ids_and_done_is_measured_all_the_same() -> None:
    async def measure() -> None:
        server = await asyncio.start_server(_plain_server, "127.0.0.1", 0)
        async with server:
            target = Target(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", model="m")
            dialect = await find_dialect(target, (1, 2), "Hello")
            assert dialect == Dialect(takes_ids=False, takes_extras=False)
            calls = [
                Call(request_id="a", role="decoder", num_prompt_tokens=2, max_tokens=3),
                Call(request_id="b", role="decoder", num_prompt_tokens=2, max_tokens=3, cancel_after_tokens=1),
            ]
            run = await run_load(target, dialect, calls, ["p", "q"], pair=0, arm="plain")
        whole, cut = run.requests
        assert (whole.text, len(whole.token_s), whole.token_ids, whole.error) == ("xxx", 3, None, None)
        assert (cut.text, cut.is_cancelled) == ("x", True)
        assert (run.peak_kv_blocks, run.num_kv_blocks) == (None, None)

    asyncio.run(asyncio.wait_for(measure(), 30))


def test_a_server_that_is_not_there_is_an_error_with_its_address() -> None:
    result = CliRunner().invoke(
        app, ["bench", "paired", "m", "--url-a", "http://127.0.0.1:1", "--url-b", "http://127.0.0.1:1"]
    )
    assert "127.0.0.1:1 answers no completion" in str(result.exception)
