"""Outputs under a grammar: random weights, so it is the grammar alone that makes them valid."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic import LLM, EngineConfig, SamplingParams, StructuredOutput
from moesaic.engine.core import EngineCore
from moesaic.engine.supervisor import StepSupervisor
from moesaic.errors import RequestError, SamplingError
from moesaic.models.loader import load_model
from moesaic.request import RequestOutput, StepOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "large"]},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "size", "ok"],
    "additionalProperties": False,
}
EOS = 259
CASES: dict[str, tuple[StructuredOutput, Callable[[str], object]]] = {
    "schema": (
        StructuredOutput(kind="json_schema", text=json.dumps(SCHEMA)),
        lambda text: sorted(json.loads(text)) == ["name", "ok", "size"] and len(json.loads(text)["name"]) <= 6,
    ),
    "regex": (StructuredOutput(kind="regex", text=r"[A-Z]{3}-\d{4}"), re.compile(r"[A-Z]{3}-\d{4}").fullmatch),
    "choice": (StructuredOutput(kind="choice", text='["yes", "no", "\\"é\\\\"]'), ("yes", "no", '"é\\').__contains__),
    "lark": (StructuredOutput(kind="grammar", text='start: "a" b\nb: /[0-9]{2}/'), re.compile("a[0-9]{2}").fullmatch),
}
CHUNKED = {"enable_chunked_prefill": True, "prefill_chunk_size": 16}


def llm(tiny_dir: Path, **settings: Any) -> LLM:
    return LLM(tiny_dir, **{"device": "cpu", "num_kv_blocks": 512, **settings})


@pytest.fixture(scope="module")
def whole(tiny_dir: Path) -> LLM:
    return llm(tiny_dir)


def params(wanted: StructuredOutput | None, **fields: Any) -> SamplingParams:
    return SamplingParams(structured_output=wanted, **{"max_tokens": 900, "temperature": 1.0, "seed": 1, **fields})


def answers(engine: LLM, *asked: SamplingParams) -> list[RequestOutput]:
    return engine.generate(["Hello " * 20] * len(asked), list(asked), use_tqdm=False)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_the_output_matches_its_grammar_and_then_stops(whole: LLM, case: str, temperature: float) -> None:
    wanted, is_valid = CASES[case]
    (output,) = answers(whole, params(wanted, temperature=temperature))
    assert (output.finish_reason, output.stop_reason, output.token_ids[-1]) == ("stop", None, EOS)
    assert is_valid(output.text), output.text


@pytest.mark.parametrize("settings", [CHUNKED, CHUNKED | {"batch_invariant": True}], ids=["chunked", "invariant"])
def test_chunks_and_lone_rows_give_the_same_output(tiny_dir: Path, whole: LLM, settings: dict[str, Any]) -> None:
    asked = [params(None, max_tokens=30), *(params(wanted) for wanted, _ in CASES.values())]
    expected = [output.token_ids for output in answers(whole, *asked)]
    assert [output.token_ids for output in answers(llm(tiny_dir, **settings), *asked)] == expected


def test_a_preempted_output_goes_on_in_its_grammar(tiny_dir: Path, whole: LLM) -> None:
    wanted = StructuredOutput(kind="regex", text="([a-z]{4}-){12}")
    asked = [params(wanted, seed=seed, max_tokens=70) for seed in range(5)]
    expected = [output.token_ids for output in answers(whole, *asked)]
    small = llm(tiny_dir, num_kv_blocks=30, **CHUNKED)
    assert [output.token_ids for output in answers(small, *asked)] == expected
    assert small.stats()["num_preemptions"] > 0
    assert small.stats()["num_grammars"] == 0


def test_rows_without_a_grammar_do_not_notice(whole: LLM) -> None:
    free = params(None, max_tokens=40, ignore_eos=True)
    alone = answers(whole, free)[0]
    assert answers(whole, params(CASES["schema"][0]), free)[1].token_ids == alone.token_ids


def test_log_probabilities_are_those_of_the_model(whole: LLM) -> None:
    (output,) = answers(whole, params(CASES["choice"][0], logprobs=0, temperature=0.0))
    assert output.logprobs is not None
    assert any(score.rank > 1 for score in output.logprobs)  # the grammar chose otherwise than the model would


def test_bias_and_penalties_choose_among_what_is_allowed(whole: LLM) -> None:
    wanted = CASES["choice"][0]
    no = params(wanted, logit_bias={ord("n"): 100.0}, repetition_penalty=5.0, presence_penalty=2.0)
    assert answers(whole, no)[0].text == "no"
    never = params(StructuredOutput(kind="choice", text='["yes"]'), logit_bias={ord("y"): -100.0})
    assert answers(whole, never)[0].text == "yes"


def test_a_stop_string_ends_it_earlier(whole: LLM) -> None:
    (output,) = answers(whole, params(CASES["schema"][0], stop='"name"'))
    assert (output.text.strip(), output.stop_reason) == ("{", '"name"')
    assert whole.stats()["num_grammars"] == 0


def test_max_tokens_cuts_it_short(whole: LLM) -> None:
    (output,) = answers(whole, params(CASES["regex"][0], max_tokens=4))
    assert (len(output.text), output.finish_reason) == (4, "length")


def test_a_special_token_can_end_the_reasoning(whole: LLM) -> None:
    wanted = StructuredOutput(kind="choice", text='["yes"]', after="<|begin|>")
    (output,) = answers(whole, params(wanted, logit_bias={256: 100.0}, skip_special_tokens=False))
    assert re.fullmatch(r"<\|begin\|>\s*yes<\|im_end\|>", output.text)


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutput(kind="regex", text="((("),
        StructuredOutput(kind="json_schema", text='{"type": 5}'),
        StructuredOutput(kind="json_schema", text='{"not": {"type": "string"}}'),
        StructuredOutput(kind="json_schema", text='{"$ref": "https://example.com/schema.json"}'),
        StructuredOutput(kind="grammar", text="start: nowhere"),
    ],
)
def test_a_bad_grammar_is_refused_at_the_door(whole: LLM, wanted: StructuredOutput) -> None:
    before = whole.stats()
    with pytest.raises(RequestError, match=f"the grammar \\({wanted.kind}\\) is refused: ") as caught:
        answers(whole, params(CASES["regex"][0]), params(wanted))
    assert caught.value.param == "structured_output"
    assert whole.stats()["num_grammars"] == 0
    assert whole.stats()["kv_blocks_free"] == before["kv_blocks_free"]


def test_a_chain_of_rules_does_not_overflow_the_stack(whole: LLM) -> None:
    """On an ordinary stack 4000 rules end the process (llguidance 1.9.1)."""
    rules = "".join(f'r{i}: "a" r{i + 1}\n' for i in range(6000))
    wanted = StructuredOutput(kind="grammar", text=f'start: r0\n{rules}r6000: "z"')
    assert answers(whole, params(wanted, max_tokens=3))[0].text == "aaa"


def test_a_model_without_a_tokenizer_refuses(tiny_dir: Path) -> None:
    model = load_model(tiny_dir, dtype=None, device=torch.device("cpu"), load_format="auto", seed=0)
    core = EngineCore(model, EngineConfig(device="cpu", num_kv_blocks=16))
    with pytest.raises(RequestError, match="no tokenizer"):
        core.add_request("a", [1], params(CASES["regex"][0]))
    assert not core.has_pending_requests()


def test_a_failed_step_does_not_move_the_matcher(tiny_dir: Path, whole: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = params(CASES["schema"][0])
    expected = answers(whole, wanted)[0].token_ids
    engine = llm(tiny_dir).engine
    engine.add_request("a", list(b"Hello " * 20), wanted)
    run, calls, tokens = engine.runner.run, 0, list[int]()

    def failing(batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits = run(batch)
        return logits * torch.nan if calls % 2 else logits

    monkeypatch.setattr(engine.runner, "run", failing)
    while engine.has_pending_requests():
        with pytest.raises(SamplingError, match="NaN"):
            engine.step()
        tokens += (token for output in engine.step() for token in output.new_token_ids)
    assert tuple(tokens) == expected
    assert calls == 2 * len(expected)


def test_a_grammar_that_gives_up_fails_its_own_request(tiny_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = llm(tiny_dir).engine
    supervisor = StepSupervisor(engine)
    engine.add_request("ruled", [1], params(CASES["regex"][0]))
    engine.add_request("free", [1], params(None, max_tokens=4, ignore_eos=True))
    events: list[StepOutput] = supervisor.step()
    engine._grammars._progress["ruled"]._matcher.consume_token(300)  # no token: the matcher never leaves that state
    while engine.has_pending_requests():
        events += supervisor.step()
    ends = {event.request_id: event for event in events if event.finish_reason}
    assert (ends["ruled"].finish_reason, ends["free"].finish_reason) == ("error", "length")
    assert "grammar" in (ends["ruled"].error or "")
    assert supervisor.is_healthy
    assert engine.stats()["num_grammars"] == 0


def test_nothing_is_left_of_a_request_that_ends_from_outside(tiny_dir: Path) -> None:
    engine = llm(tiny_dir).engine
    wanted = replace(params(CASES["regex"][0]), max_tokens=50)
    for name in ("aborted", "failed", "late"):
        engine.add_request(name, [1], wanted, timeout_s=0.0001 if name == "late" else None)
    engine.abort_request("aborted")
    engine.fail_request("failed", "why not")
    for _ in range(60):
        engine.step()
    assert not engine.has_pending_requests()
    assert engine.stats()["num_grammars"] == 0


def test_the_example_of_the_page_runs(tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "structured-output.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(example.replace('"tiny"', f"{str(tiny_dir)!r}, num_kv_blocks=64"), {})
    assert re.fullmatch(r"[A-Z]{3}-\d{4}\n", capsys.readouterr().out)
