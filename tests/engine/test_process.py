"""An engine in another process: the same tokens, and nobody waits for one that has died."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moesaic.config import EngineConfig
from moesaic.engine.client import DeltaStream, Submission
from moesaic.engine.core import EngineCore
from moesaic.engine.process import ProcessEngineClient
from moesaic.engine.thread_client import ThreadEngineClient
from moesaic.errors import ConfigError, EngineDeadError, ModelLoadError, RequestError
from moesaic.models.files import load_tokenizer
from moesaic.request import SamplingParams
from moesaic.testing.faults import load_losing_its_device, load_nothing

pytestmark = pytest.mark.slow

CONFIG = EngineConfig(device="cpu", num_kv_blocks=512, enable_chunked_prefill=True)
PROMPTS = ((72, 101, 108), (10, 20, 30, 40, 50), (7,))


def submission(prompt: tuple[int, ...] = PROMPTS[0], max_tokens: int = 8, **params: Any) -> Submission:
    chosen = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **params)
    return Submission(prompt_token_ids=prompt, sampling_params=chosen)


async def text_of(stream: DeltaStream) -> str:
    async with stream:
        return "".join([delta.text async for delta in stream])


@contextlib.contextmanager
def launched(path: Path, **options: Any) -> Iterator[ProcessEngineClient]:
    client = ProcessEngineClient(path, CONFIG, partial(load_tokenizer, path), **options)
    client.launch()
    try:
        yield client
    finally:
        asyncio.run(client.close())


def run(client: Any, scenario: Callable[[Any], Awaitable[Any]]) -> Any:  # Any: a client, and what its scenario returns
    """Run ``scenario`` with a started client, close it, and check that no exception was lost on the way."""
    lost: list[dict[str, Any]] = []

    async def body() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: lost.append(context))
        await client.start()
        try:
            return await scenario(client)
        finally:
            await client.close()

    result = asyncio.run(body())
    assert lost == []
    return result


def test_texts_equal_those_of_a_thread_and_refusals_come_as_they_were_raised(tiny_dir: Path) -> None:
    async def scenario(client: Any) -> list[str]:
        streams = [await client.submit(submission(prompt, 12, stop="q", logprobs=2)) for prompt in PROMPTS]
        with pytest.raises(RequestError, match="99999") as caught:
            await client.submit(submission((99999,)))
        assert caught.value.param == "prompt"
        texts = await asyncio.gather(*map(text_of, streams))
        stats = await client.stats()
        assert stats["kv_blocks_free"] == stats["kv_blocks_total"]
        return list(texts)

    with launched(tiny_dir) as client:
        texts = run(client, scenario)
        assert client.exit_code == 0
    thread = ThreadEngineClient(EngineCore.from_path(tiny_dir, CONFIG), load_tokenizer(tiny_dir))
    assert texts == run(thread, scenario)


def test_a_killed_engine_is_told_to_every_waiter_within_a_second(tiny_dir: Path) -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        streams = [await client.submit(submission(prompt, 4000)) for prompt in PROMPTS]
        await anext(streams[0])
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        for stream in streams:
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                async for _ in stream:
                    pass
        assert time.monotonic() - killed_s < 5, "a second on a quiet machine"
        assert not client.is_healthy
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await client.submit(submission())
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await client.stats()

    with launched(tiny_dir) as client:
        run(client, scenario)
        assert client.exit_code == 1


def test_an_engine_that_gives_up_says_why(tiny_dir: Path) -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        stream = await client.submit(submission(max_tokens=4000))
        with pytest.raises(EngineDeadError, match="RuntimeError: device lost"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError, match="device lost"):
            await client.stats()

    with launched(tiny_dir, make_core=load_losing_its_device) as client:
        run(client, scenario)


def test_an_engine_that_dies_is_started_again_and_serves(tiny_dir: Path) -> None:
    async def scenario(client: ProcessEngineClient) -> str:
        first = await client.submit(submission(max_tokens=4000))
        pid = client.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await text_of(first)
        assert not client.is_healthy
        for _ in range(1200):
            if client.is_healthy:
                break
            await asyncio.sleep(0.05)
        assert client.pid != pid
        return await text_of(await client.submit(submission()))

    with launched(tiny_dir, restarts=True) as client:
        again = run(client, scenario)
        assert client.exit_code == 0
    core = ThreadEngineClient(EngineCore.from_path(tiny_dir, CONFIG), load_tokenizer(tiny_dir))

    async def once(client: ThreadEngineClient) -> str:
        return await text_of(await client.submit(submission()))

    assert again == run(core, once)


def test_what_keeps_an_engine_from_loading_is_raised_where_it_is_launched(
    tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stages: list[str] = []
    with pytest.raises(ModelLoadError, match="nowhere"):
        ProcessEngineClient(tmp_path / "nowhere", CONFIG, lambda: None).launch(
            lambda what, fraction: stages.append(what)
        )
    with pytest.raises(Exception, match="OSError: driver not loaded"):
        ProcessEngineClient(tiny_dir, CONFIG, lambda: None, make_core=load_nothing).launch()
    too_large = EngineConfig(device="cpu", num_kv_blocks=10**9)
    with pytest.raises(ConfigError):
        ProcessEngineClient(tiny_dir, too_large, lambda: None).launch()
    assert "is killed" not in caplog.text, "one that cannot load ends by itself"


PARENT = """
import sys, time
from pathlib import Path
from moesaic.engine.process import ProcessEngineClient
from moesaic.config import EngineConfig

if __name__ == "__main__":
    client = ProcessEngineClient(Path(sys.argv[1]), EngineConfig(device="cpu", num_kv_blocks=16), lambda: None)
    client.launch()
    print(client.pid, flush=True)
    time.sleep(300)
"""


def test_an_engine_does_not_outlive_its_parent(tiny_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, str(script), str(tiny_dir)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    for _ in range(200):
        if not _is_running(pid):
            return
        time.sleep(0.05)
    raise AssertionError("the engine still runs")


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
