"""Clients that are none of ours, each in its own process and environment, against a live server (make test-clients)."""

import json
import os
import re
import subprocess
import time
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic import LLM, SamplingParams

HERE = Path(__file__).parent
CLIENTS = Path(os.environ.get("MOESAIC_CLIENTS", HERE.parents[1] / ".clients"))
PYTHON = CLIENTS / "venv" / "bin" / "python"
ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it fetches a table of prices otherwise
    "OPENAI_API_KEY": "none",
}

ON_CHUNKED = pytest.mark.parametrize("url", [True], indirect=True, ids=["chunked"])
"""Half the time for clients that start slowly; the server behind both settings of ``url`` is the same code."""

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


def run(*command: str | Path, **changes: str) -> str:
    """Return what a client wrote to stdout."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env=ENVIRONMENT | changes,
        timeout=240,
        cwd=CLIENTS,  # some keep files where they are started
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def result_of(*command: str | Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run(*command).splitlines()[-1])
    return result


@cache
def expected(tiny_dir: Path) -> tuple[str, str]:
    """Return the completion and the chat answer to "Hello", 12 greedy tokens each, without any server."""
    llm = LLM(str(tiny_dir), device="cpu", num_kv_blocks=64)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    chat = llm.render_chat([{"role": "user", "content": "Hello"}])
    completion, answer = llm.generate(["Hello", chat], params, use_tqdm=False)
    return completion.text, answer.text


def wait_until_idle(url: str) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while True:
        with urllib.request.urlopen(f"{url}/stats", timeout=30) as reply:
            stats: dict[str, Any] = json.load(reply)
        if stats["num_running"] + stats["num_waiting"] == 0 or time.monotonic() > deadline:
            return stats
        time.sleep(0.05)


def test_openai_for_node(url: str, tiny_dir: Path) -> None:
    got = result_of("node", CLIENTS / "openai_node.mjs", url)
    completion, chat = expected(tiny_dir)
    assert (got["completion"], got["chat"], got["streamed"]) == (completion, chat, chat)
    assert (got["completion_logprobs"], got["chat_logprobs"], got["usage"]["completion_tokens"]) == (12, 12, 12)
    assert isinstance(json.loads(got["structured"])["ok"], bool)
    assert got["num_before_cancel"] == 3
    assert got["models"] == ["tiny"]
    assert got["refusal"] == {"status": 400, "param": "temperature", "kind": "BadRequestError"}
    stats = wait_until_idle(url)
    assert stats["kv_blocks_free"] == stats["kv_blocks_total"]


@ON_CHUNKED
def test_litellm(url: str, tiny_dir: Path) -> None:
    got = result_of(PYTHON, HERE / "litellm_client.py", url)
    _, chat = expected(tiny_dir)
    assert got == {"chat": chat, "usage": 12, "streamed": chat, "refusal": 404}


@ON_CHUNKED
def test_langchain(url: str, tiny_dir: Path) -> None:
    got = result_of(PYTHON, HERE / "langchain_client.py", url)
    _, chat = expected(tiny_dir)
    assert got == {"chat": chat, "streamed": chat, "usage": 12, "ok_is_bool": True}


@ON_CHUNKED
def test_curl(url: str, tiny_dir: Path) -> None:
    body = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 12, "temperature": 0, "stream": True})
    out = run("curl", "-sSN", f"{url}/completions", "-H", "Content-Type: application/json", "-d", body)
    events = [line.removeprefix("data: ") for line in out.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1]) == expected(tiny_dir)[0]


def test_lm_eval_scores_as_transformers_does(url: str, tiny_dir: Path, tmp_path: Path) -> None:
    """Each log likelihood that the harness got over HTTP equals that of the unmodified model; so does the score."""
    sums = [(a, b) for a in range(4) for b in range(3)]
    lines = [
        {"question": f"{a} + {b} =", "choices": [f" {a + b}", f" {a + b + 1}", f" {a * b + 7}"], "label": 0}
        for a, b in sums
    ]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = (HERE / "sums.yaml").read_text().replace("SUMS_FILE", str(tmp_path / "sums.jsonl"))
    (tmp_path / "sums.yaml").write_text(task)
    model = f"model=tiny,base_url={url}/completions,tokenizer_backend=huggingface,tokenizer={tiny_dir},max_retries=1"
    run(
        *(PYTHON, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", model),
        *("--tasks", "moesaic_sums", "--include_path", tmp_path, "--output_path", tmp_path / "out", "--log_samples"),
        HF_DATASETS_CACHE=str(tmp_path / "datasets"),
    )
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    num_right = 0
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        scores = [float(r[0]) for r in sample["filtered_resps"]]
        own = [log_likelihood(tiny_dir, a["arg_0"], a["arg_1"]) for a in sample["arguments"].values()]
        assert scores == pytest.approx(own, abs=1e-3)
        num_right += max(range(3), key=own.__getitem__) == 0
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["moesaic_sums"]["acc,none"] == pytest.approx(num_right / 12)


@cache
def reference(tiny_dir: Path) -> tuple[Any, Any]:
    """Return transformers' own model and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32), AutoTokenizer.from_pretrained(tiny_dir)


def log_likelihood(tiny_dir: Path, context: str, continuation: str) -> float:
    model, tokenizer = reference(tiny_dir)
    whole, num_context = tokenizer.encode(context + continuation), len(tokenizer.encode(context))
    with torch.no_grad():
        logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(logprobs[i - 1, whole[i]]) for i in range(num_context, len(whole)))


@ON_CHUNKED
def test_guidellm_completes_a_run(url: str, tiny_dir: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run(
        *(CLIENTS / "venv" / "bin" / "guidellm", "run", "--backend"),
        f"kind=openai_http,target={url.removesuffix('/v1')},model=tiny",
        *("--tokenizer", f"kind=hf_auto,model={tiny_dir}", "--profile", "kind=concurrent,streams=4"),
        *(
            "--constraint",
            "kind=max_requests,count=12",
            "--data",
            "kind=synthetic_text,prompt_tokens=40,output_tokens=8",
        ),
        *("--output", f"kind=json,path={report}"),
    )
    benchmark = json.loads(report.read_text())["benchmarks"][0]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (12, 0)


def test_no_request_that_the_openapi_document_allows_or_forbids_is_an_error_of_the_server(
    url_of_short_answers: str,
) -> None:
    """Schemathesis makes them: edges of each field, alone and together, and some at random, the same ones each time."""
    said = run(
        CLIENTS / "schemathesis" / "bin" / "schemathesis",
        *("run", f"{url_of_short_answers.removesuffix('/v1')}/openapi.json", "--checks", "not_a_server_error"),
        *("--phases", "coverage,fuzzing", "--max-examples", "10", "--generation-deterministic"),
        *("--request-timeout", "60", "--suppress-health-check", "all", "--warnings", "off", "--no-color"),
    )
    assert (operations := re.search(r"(\d+) selected / (\d+) total", said)) is not None
    assert operations[1] == operations[2]
    assert (match := re.search(r"(\d+) generated, (\d+) passed", said)) is not None
    assert match[1] == match[2]
    assert int(match[1]) > 500
