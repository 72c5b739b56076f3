"""The built-in chat model answers as its dense original does in transformers."""

import pytest
import torch

from moesaic import LLM, SamplingParams
from moesaic.builtin import dense_reference

pytestmark = pytest.mark.smol

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def dense_answer() -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = dense_reference()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


@pytest.mark.parametrize("chunked", [False, True])
def test_the_capital_of_france(dense_answer: str, chunked: bool) -> None:
    llm = LLM("smol", enable_chunked_prefill=chunked, prefill_chunk_size=8, num_kv_blocks=256)
    answer = llm.chat(QUESTION, SamplingParams(max_tokens=24, temperature=0.0))
    assert answer.text == dense_answer == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
