"""What clients send wrong, what the server says of itself, and what all see when the engine dies."""

import base64
import io
import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import moesaic
from moesaic import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.engine.launched import LaunchedStep
from moesaic.engine.thread_client import ThreadEngineClient
from moesaic.models.files import load_tokenizer
from moesaic.models.hf import HFCausalLM
from moesaic.models.loader import load_model
from moesaic.request import StepOutput
from moesaic.server.app import create_app
from moesaic.server.served_model import ServedModel
from moesaic.server.settings import ServerConfig

CONFIG = EngineConfig(device="cpu", num_kv_blocks=64, max_model_len=256)
COMPLETION = {"prompt": "Hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
ROUTES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}

Serve = Callable[..., TestClient]


class FailingCore(EngineCore):
    """A core whose device is lost for good in its tenth step with four requests."""

    num_steps = 0

    def step(self) -> list[StepOutput]:
        self.num_steps += len(self.scheduler.sequences) == 4
        if self.num_steps >= 10:
            raise RuntimeError("device lost")
        return super().step()


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> HFCausalLM:
    return load_model(tiny_dir)


@pytest.fixture(scope="module")
def serve(model: HFCausalLM, tiny_dir: Path) -> Iterator[Serve]:
    """Make servers of ``tiny`` in this process."""
    with ExitStack() as stack:

        def make(core_class: type[EngineCore] = EngineCore, **served: Any) -> TestClient:
            fields = {"names": ("tiny",), "root": "tiny", "max_model_len": 256, "tokenizer": load_tokenizer(tiny_dir)}
            client = ThreadEngineClient(core_class(model, CONFIG), load_tokenizer(tiny_dir))
            return stack.enter_context(TestClient(create_app(client, ServedModel(**fields | served), CONFIG)))

        yield make


@pytest.fixture(scope="module")
def client(serve: Serve) -> TestClient:
    return serve()


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status
    error: dict[str, Any] = body["error"]
    return error


BAD_FIELDS: list[tuple[str, str, Any, str]] = [
    ("/v1/completions", "prompt", [], "must be a text"),
    ("/v1/completions", "prompt", None, "must be a text"),
    ("/v1/completions", "prompt", [1, "a"], "must be a text"),
    ("/v1/completions", "prompt", [[1], "a"], "must be a text"),
    ("/v1/completions", "prompt", [[1, 2.5]], "must be a text"),
    ("/v1/completions", "prompt", "", "0 tokens"),
    ("/v1/completions", "prompt", [9999], "9999"),
    ("/v1/completions", "prompt", [-1], "-1"),
    ("/v1/completions", "prompt", "\ud800", "no Unicode"),
    ("/v1/completions", "max_tokens", -1, "at least 0"),
    ("/v1/completions", "max_tokens", 10_000, "10000"),
    ("/v1/completions", "max_tokens", "many", "integer"),
    ("/v1/completions", "logprobs", True, "integer"),
    ("/v1/completions", "logprobs", 99, "at most 50"),
    ("/v1/completions", "suffix", "end", "not supported"),
    ("/v1/completions", "best_of", 2, "not supported"),
    ("/v1/chat/completions", "messages", [], "at least 1"),
    ("/v1/chat/completions", "messages", [{"role": "user"}], "no content"),
    ("/v1/chat/completions", "messages", [{"content": "Hi"}], "is missing"),
    ("/v1/chat/completions", "messages", [{"role": "user", "content": [{"type": "image_url"}]}], "text only"),
    ("/v1/chat/completions", "messages", [{"role": "user", "content": "\ud800"}], "no Unicode"),
    ("/v1/chat/completions", "messages", [{"role": "assistant", "tool_calls": [{}]}], "no list of function calls"),
    ("/v1/chat/completions", "max_completion_tokens", -1, "at least 0"),
    ("/v1/chat/completions", "top_logprobs", 2, "logprobs is not true"),
    ("/v1/chat/completions", "tools", [{"type": "function"}], "is missing"),
    ("/v1/chat/completions", "tool_choice", "required", "tools have none"),
    ("/v1/chat/completions", "functions", [{}], "not supported"),
    *(
        (route, field, value, words)
        for route in ROUTES
        for field, value, words in (
            ("temperature", -0.5, "temperature is -0.5"),
            ("temperature", "hot", "number"),
            ("top_p", 0, "top_p is 0"),
            ("min_tokens", 5, "max_tokens is 4"),
            ("n", 0, "greater than or equal to 1"),
            ("n", 1000, "less than or equal to 128"),
            ("seed", 1.5, "integer"),
            ("stop", [""], "empty string"),
            ("logit_bias", {"x": 1}, "token ids"),
            ("logit_bias", {"1": 1000}, "100"),
            ("logit_bias", {"99999": 1}, "99999"),
            ("stream_options", {"include_usage": True}, "stream is not true"),
            ("response_format", {"type": "structural_tag"}, "json_schema"),
            ("bad_words", ["x"], "not supported"),
        )
    ),
]


@pytest.mark.parametrize(("route", "field", "value", "words"), BAD_FIELDS)
def test_a_bad_field_is_refused_by_name(client: TestClient, route: str, field: str, value: Any, words: str) -> None:
    body = json.dumps({**ROUTES[route], field: value})
    response = client.post(route, content=body, headers={"Content-Type": "application/json"})
    error = error_of(response, 400)
    assert error["type"] == "BadRequestError"
    assert error["param"] == field
    assert words in error["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_bad_request_for_a_stream_has_a_status_of_its_own(client: TestClient, route: str) -> None:
    asked = {**ROUTES[route], "stream": True}
    assert error_of(client.post(route, json={**asked, "max_tokens": 10_000}), 400)["param"] == "max_tokens"
    assert error_of(client.post(route, json={**asked, "prompt_logprobs": 1}), 400)["param"] == "prompt_logprobs"


def test_a_body_that_is_no_json_object_is_a_bad_request(client: TestClient) -> None:
    as_json = {"Content-Type": "application/json"}
    assert "no JSON" in error_of(client.post("/v1/completions", content='{"prompt":', headers=as_json), 400)["message"]
    assert "object" in error_of(client.post("/v1/completions", content="[1]", headers=as_json), 400)["message"]
    form = client.post("/v1/completions", content='{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert "text/plain" in error_of(form, 400)["message"]
    assert error_of(client.post("/v1/completions", json={}), 400)["param"] == "prompt"


def test_what_is_not_there_is_not_found_in_the_same_shape(client: TestClient) -> None:
    assert "/v2/nothing" in error_of(client.get("/v2/nothing"), 404)["message"]
    assert error_of(client.get("/v1/models/other"), 404)["param"] == "model"
    for route, body in ROUTES.items():
        error = error_of(client.post(route, json={**body, "model": "other"}), 404)
        assert (error["type"], error["param"]) == ("NotFoundError", "model")
    assert client.get("/v1/completions").headers["Allow"] == "POST"
    error_of(client.get("/v1/completions"), 405)


@pytest.mark.parametrize(
    "neutral",
    [
        {"response_format": {"type": "text"}},
        {"best_of": 1, "suffix": None},
        {"tools": None, "tool_choice": "auto"},
        {"stop": None, "logit_bias": None, "seed": None, "user": "someone", "stream": False},
        {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0},
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_fields_that_ask_for_nothing_are_taken(client: TestClient, route: str, neutral: dict[str, Any]) -> None:
    plain = client.post(route, json=ROUTES[route]).json()["choices"]
    response = client.post(route, json={**ROUTES[route], **neutral})
    assert response.status_code == 200, response.text
    assert response.json()["choices"] == plain


def test_unknown_fields_are_taken_and_logged_once(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    client = serve()
    with caplog.at_level(logging.INFO, logger="moesaic.server.app"):
        for _ in range(2):
            assert client.post("/v1/completions", json={**COMPLETION, "mystery": 1, "prefix": 2}).status_code == 200
    assert [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()] == [
        "unknown request field ignored: name='mystery'",
        "unknown request field ignored: name='prefix'",
    ]


def test_the_log_of_unknown_fields_is_bounded(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    client = serve()
    with caplog.at_level(logging.INFO, logger="moesaic.server.app"):
        assert client.post("/v1/completions", json=COMPLETION | {f"x{i}": i for i in range(500)}).status_code == 200
    assert len([record for record in caplog.records if "unknown" in record.getMessage()]) == 64


def test_an_output_without_a_limit_is_short_for_completions_and_long_for_chat(client: TestClient) -> None:
    completion = {name: value for name, value in COMPLETION.items() if name != "max_tokens"}
    chat = {name: value for name, value in CHAT.items() if name != "max_tokens"}
    assert client.post("/v1/completions", json=completion).json()["usage"]["completion_tokens"] == 16
    assert client.post("/v1/chat/completions", json=chat).json()["usage"]["total_tokens"] == 256


def test_the_models_own_sampling_applies_where_the_client_says_nothing(serve: Serve) -> None:
    greedy = serve(defaults={"temperature": 0.0, "repetition_penalty": 1.5})
    silent = {"prompt": "Hello", "max_tokens": 8, "ignore_eos": True}
    spoken = {**silent, "temperature": 0.0, "repetition_penalty": 1.5}
    answers = [greedy.post("/v1/completions", json=body).json()["choices"] for body in (silent, spoken)]
    assert answers[0] == answers[1]
    plain = greedy.post("/v1/completions", json={**silent, "repetition_penalty": 1.0}).json()["choices"]
    assert plain != answers[0]


def test_tools_are_ignored_where_no_tool_may_be_chosen(client: TestClient) -> None:
    body = {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_prompt_logprobs_come_by_token_id(client: TestClient) -> None:
    body = {**COMPLETION, "prompt": [72, 105], "prompt_logprobs": 2}
    first, second = client.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["105"]["decoded_token"] == "i"
    assert sorted(entry["rank"] for entry in second.values())[:2] == [1, 2]
    chat = client.post("/v1/chat/completions", json={**CHAT, "prompt_logprobs": 0}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def routed_shape(choice: dict[str, Any]) -> tuple[int, ...]:
    shape: tuple[int, ...] = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"]))).shape
    return shape


@pytest.mark.parametrize("route", ROUTES)
def test_routed_experts_come_with_each_choice_and_in_a_stream_with_its_last_chunk(
    client: TestClient, route: str
) -> None:
    body = {**ROUTES[route], "return_routed_experts": True, "n": 2, "max_tokens": 3, "ignore_eos": True}
    reply = client.post(route, json=body).json()
    num_tokens = reply["usage"]["prompt_tokens"] + 3 - 1
    shapes = {routed_shape(choice) for choice in reply["choices"]}
    assert {shape[0] for shape in shapes} == {num_tokens}
    events = client.post(route, json={**body, "stream": True}).text.split("\n\n")
    choices = [c for e in events if e.startswith("data: {") for c in json.loads(e[6:])["choices"]]
    assert {routed_shape(c) for c in choices if c["finish_reason"]} == shapes
    assert not any("routed_experts" in c for c in choices if not c["finish_reason"])
    assert "routed_experts" not in client.post(route, json=ROUTES[route]).json()["choices"][0]


def test_a_stream_is_server_sent_events(client: TestClient) -> None:
    response = client.post("/v1/completions", json={**COMPLETION, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers
    *events, done, empty = response.text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events)


def test_absent_and_null_are_as_openai_has_them(client: TestClient) -> None:
    plain = client.post("/v1/chat/completions", json={**CHAT, "stream": True}).text.split("\n\n")
    choice = json.loads(plain[0].removeprefix("data: "))["choices"][0]
    assert choice == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert not any('"usage"' in event for event in plain)
    asked = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    *events, _done, _empty = client.post("/v1/chat/completions", json=asked).text.split("\n\n")
    assert all('"usage":null' in event for event in events[:-1])


def test_the_server_says_what_was_asked_for_and_what_is_active(client: TestClient) -> None:
    settings = client.get("/v1/config").json()
    assert settings["config"]["num_kv_blocks"] == 64
    assert settings["model"]["max_model_len"] == 256
    assert settings["features"]["chunked_prefill"] == {"requested": False, "active": False, "reason": "as requested"}
    assert client.get("/v1/stats").json()["kv_blocks_total"] == 64
    assert client.get("/version").json() == {"version": moesaic.__version__}
    assert client.get("/health").json() == {"status": "ok"}


def test_the_interface_describes_itself(client: TestClient) -> None:
    assert set(ROUTES) < set(client.get("/openapi.json").json()["paths"])


def test_a_model_of_token_ids_only_takes_and_gives_them(model: HFCausalLM) -> None:
    served = ServedModel(names=("ids",), root="ids", max_model_len=256)
    app = create_app(ThreadEngineClient(EngineCore(model, CONFIG), None), served, CONFIG)
    with TestClient(app) as client:
        assert error_of(client.post("/v1/completions", json=COMPLETION), 400)["param"] == "prompt"
        assert error_of(client.post("/v1/chat/completions", json=CHAT), 400)["param"] == "messages"
        body = {**COMPLETION, "prompt": [1, 2], "return_token_ids": True, "logprobs": 1, "echo": True}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
        assert (choice["text"], len(choice["token_ids"])) == ("", 4)
        assert choice["logprobs"]["tokens"][:2] == ["token_id:1", "token_id:2"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_step_is_told_to_its_request_and_the_server_goes_on(serve: Serve, stream: bool) -> None:
    class Stumbling(EngineCore):
        def _commit(self, step: LaunchedStep) -> list[StepOutput]:
            outputs = super()._commit(step)
            if self.stats()["num_steps"] == 3:
                raise OSError("secret of the machine")
            return outputs

    client = serve(Stumbling)
    response = client.post("/v1/completions", json={**COMPLETION, "max_tokens": 100, "stream": stream})
    if stream:
        *_, last, done, _ = response.text.split("\n\n")
        assert done == "data: [DONE]"
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        error = error_of(response, 500)
    assert (error["type"], error["code"]) == ("InternalServerError", 500)
    assert "OSError" in error["message"]
    assert "secret" not in error["message"]
    assert client.get("/health").status_code == 200
    stats = client.get("/v1/stats").json()
    assert (stats["num_failed_steps"], stats["last_error"], stats["is_healthy"]) == (1, "OSError", True)
    assert client.post("/v1/completions", json=COMPLETION).status_code == 200


def test_when_the_engine_dies_every_waiter_is_told_and_health_turns_red(serve: Serve) -> None:
    client = serve(FailingCore)
    asked = {**COMPLETION, "max_tokens": 100}
    bodies = [("/v1/completions", {**asked, "stream": stream}) for stream in (False, True)]
    bodies += [("/v1/chat/completions", {**CHAT, "max_tokens": 100, "stream": stream}) for stream in (False, True)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        responses = list(pool.map(lambda body: client.post(body[0], json=body[1]), bodies))
    for response, (_, body) in zip(responses, bodies, strict=True):
        if body["stream"] and response.status_code == 200:
            *_, last, done, _ = response.text.split("\n\n")
            assert done == "data: [DONE]"
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            error = error_of(response, 503)
        assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503)
        assert "device lost" in error["message"]
    for response in (client.get("/health"), client.get("/v1/stats"), client.post("/v1/completions", json=COMPLETION)):
        assert "device lost" in error_of(response, 503)["message"]
    assert client.get("/v1/models").status_code == 200


def test_a_strict_server_refuses_fields_that_no_one_reads(model: HFCausalLM, tiny_dir: Path) -> None:
    served = ServedModel(names=("tiny",), root="tiny", max_model_len=256, tokenizer=load_tokenizer(tiny_dir))
    engine = ThreadEngineClient(EngineCore(model, CONFIG), load_tokenizer(tiny_dir))
    app = create_app(engine, served, CONFIG, ServerConfig(strict_api=True))
    with TestClient(app) as client:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 200
        error = error_of(client.post("/v1/completions", json=body | {"flavour": 1}), 400)
        assert error["param"] == "flavour"
