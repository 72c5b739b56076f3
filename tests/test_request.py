import math

import pytest

from moesaic.errors import RequestError
from moesaic.request import SamplingParams


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": "12"}, "stop_token_ids"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 51}, "logprobs"),
        ({"prompt_logprobs": 51}, "prompt_logprobs"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"top_k": 2**64}, "top_k"),
        ({"stop_token_ids": [1, 2**70]}, "stop_token_ids"),
        ({"allowed_token_ids": [2**63]}, "allowed_token_ids"),
        ({"logit_bias": {2**63: 1.0}}, "logit_bias"),
        ({"stop": ["a", "\ud800"]}, "stop"),
    ],
)
def test_bad_parameters_are_refused_by_name(params: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError, match=param) as caught:
        SamplingParams(**params)  # type: ignore[arg-type]  # bad on purpose
    assert caught.value.param == param


def test_edges_are_accepted() -> None:
    SamplingParams(temperature=0, top_p=1.0, min_p=1, top_k=-1, max_tokens=0, logprobs=0, presence_penalty=-2)
    SamplingParams(max_tokens=None, min_tokens=5)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


def test_parameters_cannot_be_changed() -> None:
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.temperature = 0.5  # type: ignore[misc]  # frozen
