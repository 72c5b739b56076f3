"""What goes into a message comes out of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.engine.messages import (
    AbortRequests,
    AddRequests,
    Answer,
    EngineDied,
    NewRequest,
    PauseRequests,
    QueryStats,
    QuerySteps,
    Refusal,
    ResumeRequests,
    StepDone,
    Stop,
)
from moesaic.engine.wire import EngineReady, LoadFailed, LoadProgress, decode, encode
from moesaic.errors import ConfigError, InvariantError, MoesaicError, QueueFullError, RequestError
from moesaic.request import RoutedTokens, SamplingParams, StepOutput, TokenLogprobs
from moesaic.structured import StructuredOutput

IDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
TOKENS = st.lists(st.integers(0, 2**31), max_size=5).map(tuple)
LOGPROBS = st.builds(
    TokenLogprobs,
    token_id=st.integers(0, 2**31),
    logprob=st.floats(max_value=0),
    rank=st.integers(1, 10**6),
    top=st.lists(st.tuples(st.integers(0, 2**31), st.floats(max_value=0)), max_size=3).map(tuple),
)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 10**6),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    seed=st.none() | st.integers(-(2**62), 2**62),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=3),
    stop=st.lists(IDS, max_size=3),
    stop_token_ids=TOKENS,
    structured_output=st.none() | st.just(StructuredOutput(kind="regex", text="a+")),
)
REQUESTS = st.builds(
    NewRequest,
    request_id=IDS,
    prompt_token_ids=TOKENS,
    sampling_params=PARAMS,
    priority=st.integers(-5, 5),
    timeout_s=st.none() | st.floats(0.1, 100),
    sibling_of=st.none() | IDS,
)
OUTPUTS = st.builds(
    StepOutput,
    request_id=IDS,
    new_token_ids=TOKENS,
    finish_reason=st.sampled_from([None, "stop", "length", "abort", "error"]),
    stop_reason=st.none() | st.integers(0, 9) | IDS,
    num_computed_prompt_tokens=st.none() | st.integers(0, 10**6),
    logprobs=st.none() | st.lists(LOGPROBS, max_size=2).map(tuple),
    prompt_logprobs=st.none() | st.lists(st.none() | LOGPROBS, max_size=3).map(tuple),
    error=st.none() | IDS,
    routed_experts=st.none() | st.builds(RoutedTokens, *[st.integers(0, 10**6)] * 3, st.binary(max_size=9)),
)
VALUES = st.one_of(
    st.builds(AddRequests, st.integers(0, 99), st.lists(REQUESTS, max_size=3).map(tuple)),
    st.builds(StepDone, st.lists(OUTPUTS, max_size=4).map(tuple)),
    st.sampled_from(
        [
            AbortRequests(("a", "b")),
            PauseRequests(("a",)),
            ResumeRequests(()),
            QueryStats(3),
            QuerySteps(3, 7),
            Stop(),
            Answer(1),
            Answer(2, {"num": 1, "by": {"x": [1.5, None, True]}}),
            EngineReady({"a": 1}),
            LoadProgress("loading", 0.5),
            EngineDied("RuntimeError: lost"),
        ]
    ),
)


@given(st.lists(VALUES, max_size=4))
def test_a_message_gives_back_what_was_put_in(values: list[object]) -> None:
    assert decode(encode(values)) == values


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("bad", param="prompt"), RequestError),
        (QueueFullError("full"), QueueFullError),
    ],
)
def test_a_refusal_keeps_the_class_the_text_and_the_field(error: RequestError, kind: type[RequestError]) -> None:
    (refusal,) = decode(encode([Refusal(7, error)]))
    assert (refusal.ticket, type(refusal.error)) == (7, kind)
    assert (str(refusal.error), refusal.error.param) == (str(error), error.param)


def test_what_kept_an_engine_from_starting_is_raised_as_it_was() -> None:
    ours = decode(encode([LoadFailed.of(ConfigError("too few blocks"))]))[0].error()
    assert (type(ours), str(ours)) == (ConfigError, "too few blocks")
    other = decode(encode([LoadFailed.of(OSError("no driver"))]))[0].error()
    assert (type(other), "OSError: no driver" in str(other)) == (MoesaicError, True)


@pytest.mark.parametrize("message", [b"", b"\xc1", encode([Stop()])[:-1], b"\x91\x92\xa4Nope\x80"])
def test_bytes_that_no_one_here_wrote_are_refused(message: bytes) -> None:
    with pytest.raises(InvariantError, match="cannot be read"):
        decode(message)
