"""What the model sees of a text, and fields that change which tokens it gets or may choose."""

from typing import Any

import httpx2
import openai
import pytest

from moesaic import LLM


def post(url: str, route: str, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{url}{route}", json=body, timeout=60)


def test_a_text_becomes_the_ids_that_a_completion_gets_and_back(server_url: str, oracle: LLM) -> None:
    reply = post(server_url, "/tokenize", prompt="Hello", return_token_strs=True).json()
    assert reply["tokens"] == list(oracle.tokenizer("Hello")["input_ids"])
    assert (reply["count"], len(reply["token_strs"])) == (len(reply["tokens"]), reply["count"])
    assert reply["max_model_len"] > 0
    assert post(server_url, "/detokenize", tokens=reply["tokens"]).json() == {"prompt": "Hello"}


def test_messages_become_the_ids_that_a_chat_gets(server_url: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    reply = post(server_url, "/tokenize", messages=messages).json()
    chat = post(server_url, "/v1/chat/completions", model="tiny", messages=messages, max_tokens=1).json()
    assert reply["count"] == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("route", "body", "text"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "either prompt or messages"),
        ("/detokenize", {"tokens": [10**9]}, "1000000000 is unknown"),
        ("/detokenize", {"tokens": [-1]}, "-1 is unknown"),
    ],
)
def test_what_has_no_tokens_or_no_text_is_refused(server_url: str, route: str, body: Any, text: str) -> None:
    reply = post(server_url, route, **body)
    assert reply.status_code == 400
    assert text in reply.json()["error"]["message"]


def test_an_unknown_model_is_404(server_url: str) -> None:
    assert post(server_url, "/tokenize", model="no-such-model", prompt="a").status_code == 404


def test_a_prompt_too_long_keeps_its_last_tokens(server_url: str) -> None:
    body = {"model": "tiny", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    whole = post(server_url, "/v1/completions", prompt=[9, 8, 7, 6, 5], truncate_prompt_tokens=3, **body).json()
    last = post(server_url, "/v1/completions", prompt=[7, 6, 5], **body).json()
    assert whole["choices"][0]["text"] == last["choices"][0]["text"]
    assert whole["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_tokens_are_chosen(server_url: str, temperature: float) -> None:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        extra = {"allowed_token_ids": [70, 71, 72], "return_token_ids": True, "ignore_eos": True}
        reply = client.completions.create(
            model="tiny", prompt="Hello", max_tokens=20, temperature=temperature, extra_body=extra
        )
    chosen = set(reply.choices[0].token_ids)  # type: ignore[attr-defined]  # an extension
    assert chosen <= {70, 71, 72}


@pytest.mark.parametrize("ids", [[], [10**9]])
def test_a_list_that_allows_nothing_is_refused(server_url: str, ids: list[int]) -> None:
    reply = post(server_url, "/v1/completions", model="tiny", prompt="a", allowed_token_ids=ids)
    assert reply.status_code == 400
    assert "allowed_token_ids" in reply.text
