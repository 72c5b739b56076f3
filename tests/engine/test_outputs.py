"""Text deltas, stop strings, the final answer and its times."""

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moesaic.engine.outputs import OutputProcessor, ProcessedStep, TextDelta
from moesaic.errors import DuplicateRequestError, RequestError
from moesaic.request import RequestOutput, SamplingParams, StepOutput, TokenLogprobs


def _letters() -> Tokenizer:
    """One token per byte, and an EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


TOKENIZER = _letters()
EOS = TOKENIZER.encode("</s>").ids[0]


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text).ids)


def logprobs_of(token_ids: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token_id=i, logprob=-1.0, rank=1, top=()) for i in token_ids)


def create_processor(
    *request_ids: str, tokenizer: Any = TOKENIZER, arrival_s: float = 0.0, **params: Any
) -> OutputProcessor:
    processor = OutputProcessor(tokenizer)
    for request_id in request_ids or ("a",):
        processor.add(request_id, "Hi", ids("Hi"), SamplingParams(**{"max_tokens": 100, **params}), arrival_s)
    return processor


def step(
    processor: OutputProcessor, text: str | tuple[int, ...], *, now_s: float = 1.0, **fields: Any
) -> ProcessedStep:
    token_ids = ids(text) if isinstance(text, str) else text
    return processor.process([StepOutput(request_id="a", new_token_ids=token_ids, **fields)], now_s)


def delta_of(processor: OutputProcessor, text: str | tuple[int, ...], **fields: Any) -> TextDelta:
    (delta,) = step(processor, text, **fields).deltas
    return delta


def output_of(delta: TextDelta) -> RequestOutput:
    assert delta.output is not None
    return delta.output


def test_text_comes_with_its_tokens_and_the_answer_with_the_last_delta() -> None:
    processor = create_processor()
    first = delta_of(processor, "Hel")
    assert (first.text, first.token_ids, first.finish_reason, first.output) == ("Hel", ids("Hel"), None, None)
    last = delta_of(processor, "lo", finish_reason="length")
    output = output_of(last)
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == (
        "Hello",
        ids("Hello"),
        "length",
        None,
    )
    assert (output.prompt, output.prompt_token_ids, output.logprobs) == ("Hi", ids("Hi"), None)
    assert processor.num_unfinished == 0


def test_requests_of_one_step_are_kept_apart() -> None:
    processor = create_processor("a", "b")
    outputs = [StepOutput(request_id=r, new_token_ids=ids(t)) for r, t in (("b", "x"), ("a", "y"), ("unknown", "z"))]
    assert [(d.request_id, d.text) for d in processor.process(outputs, 1.0).deltas] == [("b", "x"), ("a", "y")]


def test_half_a_character_waits_for_the_other_half_or_the_end() -> None:
    processor = create_processor()
    first, second = ids("é")
    assert delta_of(processor, (first,)).text == ""
    assert delta_of(processor, (second,)).text == "é"
    assert delta_of(processor, (first,), finish_reason="length").text == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(("include", "text"), [(False, "one"), (True, "one\n\n")])
def test_a_stop_string_ends_the_request_and_asks_for_its_abort(include: bool, text: str) -> None:
    processor = create_processor(stop=["\n\n"], include_stop_str_in_output=include)
    assert delta_of(processor, "one\n").text == "one"
    ended = step(processor, "\n")
    assert ended.aborts == ["a"]
    output = output_of(ended.deltas[0])
    assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", "\n\n")
    assert step(processor, "late", finish_reason="abort") == ProcessedStep()


def test_tokens_and_logprobs_end_with_the_token_that_completes_the_stop_string() -> None:
    processor = create_processor(stop="END", logprobs=0)
    tokens = ids("xENDyz")
    delta = delta_of(processor, tokens, logprobs=logprobs_of(tokens), finish_reason="length")
    assert delta.token_ids == ids("xEND")
    assert (output_of(delta).token_ids, output_of(delta).text) == (ids("xEND"), "x")
    assert delta.logprobs == output_of(delta).logprobs == logprobs_of(ids("xEND"))
    assert output_of(delta).metrics.num_output_tokens == 4


def test_a_request_that_the_engine_ended_itself_is_not_aborted() -> None:
    ended = step(create_processor(stop="."), "a.", finish_reason="length")
    assert ended.aborts == []
    assert (ended.deltas[0].finish_reason, ended.deltas[0].stop_reason) == ("stop", ".")


def test_text_held_back_for_a_stop_string_is_shown_at_the_end() -> None:
    processor = create_processor(stop="END")
    assert delta_of(processor, "xEN").text == "x"
    assert delta_of(processor, (), finish_reason="abort").text == "EN"


def test_a_stop_string_within_min_tokens_does_not_count() -> None:
    processor = create_processor(stop="a", min_tokens=3)
    delta = delta_of(processor, "aaaa")
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("aa", ids("aaa"), "a")


@pytest.mark.parametrize(("skip", "text"), [(True, "x"), (False, "x</s>")])
def test_eos_is_a_token_and_its_text_is_that_of_a_special_token(skip: bool, text: str) -> None:
    delta = delta_of(create_processor(skip_special_tokens=skip), (*ids("x"), EOS), finish_reason="stop")
    assert delta.token_ids[-1] == EOS
    assert (delta.text, delta.stop_reason) == (text, None)


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "x!")])
def test_a_stop_token_is_in_the_tokens_but_not_in_the_text(include: bool, text: str) -> None:
    (stop_id,) = ids("!")
    processor = create_processor(stop_token_ids=[stop_id], include_stop_str_in_output=include)
    delta = delta_of(processor, "x!", finish_reason="stop", stop_reason=stop_id)
    assert (delta.text, delta.token_ids, delta.stop_reason) == (text, ids("x!"), stop_id)


def test_log_probabilities_are_passed_on_and_collected() -> None:
    processor = create_processor(logprobs=0, prompt_logprobs=0)
    prompt = (None, *logprobs_of(ids("i")))
    first = delta_of(processor, "a", logprobs=logprobs_of(ids("a")), prompt_logprobs=prompt)
    assert (first.logprobs, first.prompt_logprobs) == (logprobs_of(ids("a")), prompt)
    last = delta_of(processor, "b", logprobs=logprobs_of(ids("b")), finish_reason="length")
    assert last.prompt_logprobs is None
    assert (output_of(last).logprobs, output_of(last).prompt_logprobs) == (logprobs_of(ids("ab")), prompt)


def test_times_are_of_the_clock_that_the_caller_passes() -> None:
    processor = create_processor(arrival_s=10.0)
    for now_s in (12.0, 12.5, 15.0):
        step(processor, "x", now_s=now_s)
    metrics = output_of(delta_of(processor, "yz", now_s=15.25, finish_reason="length")).metrics
    assert (metrics.arrival_s, metrics.first_token_s, metrics.ttft_s, metrics.finished_s) == (10.0, 12.0, 2.0, 15.25)
    assert (metrics.num_output_tokens, metrics.largest_itl_s) == (5, 2.5)


@pytest.mark.parametrize(("text", "stall"), [("", None), ("x", None), ("xy", 0.0)])
def test_a_stall_needs_two_tokens(text: str, stall: float | None) -> None:
    metrics = output_of(delta_of(create_processor(), text, finish_reason="length")).metrics
    assert metrics.largest_itl_s == stall
    assert (metrics.first_token_s is None) == (text == "")


def test_a_client_that_leaves_gets_what_there_was() -> None:
    processor = create_processor(stop="END")
    step(processor, "xE")
    delta = processor.finish("a", "abort", 3.0)
    assert delta is not None
    assert (delta.text, output_of(delta).text, delta.finish_reason) == ("E", "xE", "abort")
    assert processor.finish("a", "abort", 4.0) is None


def test_a_failure_says_why_and_keeps_what_there_was() -> None:
    processor = create_processor(stop="END")
    step(processor, "xE")
    delta = delta_of(processor, (), finish_reason="error", error="the step failed")
    output = output_of(delta)
    assert (delta.text, delta.finish_reason, delta.error) == ("E", "error", "the step failed")
    assert (output.text, output.finish_reason, output.error) == ("xE", "error", "the step failed")


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    processor = create_processor()
    with pytest.raises(DuplicateRequestError, match="'a' is in use"):
        processor.add("a", None, (1,), SamplingParams(), 0.0)
    step(processor, "x", finish_reason="length")
    processor.add("a", None, (1,), SamplingParams(), 0.0)


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    processor = create_processor(tokenizer=None)
    delta = delta_of(processor, (1, 2), finish_reason="length")
    assert (delta.text, output_of(delta).text, output_of(delta).token_ids) == ("", "", (1, 2))
    with pytest.raises(RequestError, match="use stop_token_ids") as error:
        create_processor(tokenizer=None, stop=["x"])
    assert error.value.param == "stop"


@given(
    st.text("ab\n", max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_deltas_add_up_to_the_answer_however_the_steps_are_cut(text: str, stop: list[str], sizes: list[int]) -> None:
    whole = output_of(delta_of(create_processor(stop=stop), text, finish_reason="length"))
    processor = create_processor(stop=stop)
    deltas: list[TextDelta] = []
    at = 0
    for turn in range(len(text) + 1):
        size = sizes[turn % len(sizes)]
        reason = "length" if at + size > len(text) else None
        deltas += step(processor, ids(text)[at : at + size], finish_reason=reason).deltas
        at += size
        if reason:
            break
    assert "".join(d.text for d in deltas) == output_of(deltas[-1]).text == whole.text
    assert output_of(deltas[-1]).token_ids == whole.token_ids
    assert deltas[-1].finish_reason == whole.finish_reason


def test_joined_deltas_tell_what_they_told_one_by_one() -> None:
    """A field that is added to a delta fails here until somebody says how two of it are one."""
    first = TextDelta(request_id="a", text="x", token_ids=(1,), logprobs=logprobs_of((1,)), prompt_logprobs=(None,))
    second = TextDelta(request_id="a", text="", token_ids=(2, 3), logprobs=logprobs_of((2, 3)), time_s=2.0)
    last = TextDelta(request_id="a", text="y", token_ids=(), finish_reason="stop", stop_reason="z", time_s=3.0)
    whole = TextDelta.joined((first, second, last))
    assert whole == TextDelta(
        request_id="a",
        text="xy",
        token_ids=(1, 2, 3),
        logprobs=logprobs_of((1, 2, 3)),
        prompt_logprobs=(None,),
        finish_reason="stop",
        stop_reason="z",
        error=None,
        output=None,
        time_s=3.0,
    )
    assert TextDelta.joined((first,)) is first
    assert {field.name for field in fields(TextDelta)} == {
        *("request_id", "text", "token_ids", "logprobs", "prompt_logprobs"),
        *("finish_reason", "stop_reason", "error", "output", "time_s", "num_computed_prompt_tokens"),
    }
    parts = [TextDelta(request_id="a", text="", token_ids=(), num_computed_prompt_tokens=n) for n in (8, 16)]
    assert TextDelta.joined(parts) is not parts[1]
    assert TextDelta.joined(parts).num_computed_prompt_tokens == 16
    assert TextDelta.joined([*parts, second]).num_computed_prompt_tokens is None, "the prompt is done"
