import itertools
from typing import Any

import pytest

from moesaic import LLM, EngineConfig, RequestOutput, SamplingParams
from moesaic.errors import ConfigError, EngineDeadError, ModelLoadError, RequestError
from moesaic.testing.models import save_tiny

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_dir) -> LLM:  # type: ignore[no-untyped-def]  # a path
    return LLM(tiny_dir, num_kv_blocks=64, enable_chunked_prefill=True, prefill_chunk_size=4)


def test_one_prompt_or_many_text_or_ids(llm: LLM) -> None:
    (one,) = llm.generate("hello", GREEDY)
    (ids,) = llm.generate([104, 101, 108, 108, 111], GREEDY)
    many = llm.generate(["hello", [104, 101, 108, 108, 111]], GREEDY, use_tqdm=False)
    assert isinstance(one, RequestOutput)
    assert one.token_ids == ids.token_ids == many[0].token_ids == many[1].token_ids
    assert (one.prompt, ids.prompt) == ("hello", None)
    assert one.prompt_token_ids == ids.prompt_token_ids
    assert one.finish_reason == "length"
    assert one.metrics.num_output_tokens == 5


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (9, 1, 5)]
    outputs = llm.generate(["a long prompt to read", "b", "c"], params, use_tqdm=False)
    assert [len(o.token_ids) for o in outputs] == [9, 1, 5]


def test_no_prompts_is_no_answer(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (free,) = llm.generate("stop me", SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True), use_tqdm=False)
    stop = free.text[6:8]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, stop=stop)
    (stopped,) = llm.generate("stop me", params, use_tqdm=False)
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.text == free.text[: free.text.index(stop)]
    assert llm.stats()["kv_blocks_free"] == 64


def test_a_bad_prompt_among_good_ones_is_refused_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError, match="token id 999"):
        llm.generate(["good", [999]], GREEDY, use_tqdm=False)
    assert not llm.engine.has_pending_requests()
    assert llm.stats()["kv_blocks_free"] == 64
    llm.generate(["good"], GREEDY, use_tqdm=False)


def test_as_many_params_as_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling params for 1 prompts"):
        llm.generate(["a"], [GREEDY, GREEDY])


def test_chat_renders_the_models_template(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert llm.tokenizer is not None
    assert "<|im_start|>assistant" in llm.tokenizer.decode(list(output.prompt_token_ids))


def test_a_model_without_a_tokenizer_works_with_token_ids(tmp_path) -> None:  # type: ignore[no-untyped-def]
    save_tiny("mixtral", tmp_path)
    llm = LLM(tmp_path, num_kv_blocks=16)
    (output,) = llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
    assert (len(output.token_ids), output.text) == (5, "")
    with pytest.raises(RequestError, match="has no tokenizer"):
        llm.generate("text", GREEDY)
    with pytest.raises(RequestError, match="no tokenizer, so there is no text"):
        llm.generate([5], SamplingParams(stop="x"))
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    assert not llm.engine.has_pending_requests()


def test_dummy_weights_need_only_a_config(tmp_path) -> None:  # type: ignore[no-untyped-def]
    save_tiny("qwen3_moe", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError):
        LLM(tmp_path, num_kv_blocks=16)
    llm = LLM(tmp_path, load_format="dummy", num_kv_blocks=16)
    assert len(llm.generate([5, 6], GREEDY, use_tqdm=False)[0].token_ids) == 5


def test_settings_are_those_of_the_engine_config(tiny_dir) -> None:  # type: ignore[no-untyped-def]
    assert LLM(tiny_dir, num_kv_blocks=8).engine.config == EngineConfig(num_kv_blocks=8)
    with pytest.raises(ConfigError, match="unknown setting 'chunk'"):
        LLM(tiny_dir, chunk=3)
    with pytest.raises(ConfigError, match="prefill_chunk_size is 0"):
        LLM(tiny_dir, prefill_chunk_size=0)


def test_unknown_models_are_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelLoadError, match="no directory"):
        LLM(tmp_path / "nowhere")


def test_an_answer_whose_step_failed_says_so_and_the_others_are_whole(
    tiny_dir,  # type: ignore[no-untyped-def]  # a path
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM(tiny_dir, num_kv_blocks=64, max_batch_size=1)
    begin, num_calls = llm.engine.sampler.begin, itertools.count(1)

    def fail_second(*args: Any) -> Any:
        if next(num_calls) == 2:
            raise OSError("fault")
        return begin(*args)

    monkeypatch.setattr(llm.engine.sampler, "begin", fail_second)
    broken, sound = llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert (broken.finish_reason, len(broken.token_ids)) == ("error", 1)
    assert "OSError" in (broken.error or "")
    assert (sound.finish_reason, len(sound.token_ids), sound.error) == ("length", 5, None)
    assert llm.stats()["num_failed_steps"] == 1


def test_an_engine_that_gives_up_is_an_exception_with_its_cause(
    tiny_dir,  # type: ignore[no-untyped-def]  # a path
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM(tiny_dir, num_kv_blocks=64, max_batch_size=1, max_consecutive_failed_steps=2)

    def fail(*args: Any) -> Any:
        raise OSError("device lost")

    monkeypatch.setattr(llm.engine.sampler, "begin", fail)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="device lost") as caught:
            llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
        assert isinstance(caught.value.__cause__, OSError)
    assert not llm.engine.has_pending_requests()
    stats = llm.stats()
    assert (stats["is_healthy"], stats["kv_blocks_free"]) == (False, 64)
