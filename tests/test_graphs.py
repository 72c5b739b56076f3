import torch

from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.graphs import graph_refusal, graph_sizes
from moesaic.segments import segment_sizes
from moesaic.testing.models import tiny_causal_lm, tiny_model


def test_rows_are_captured_in_powers_of_two_and_the_most_there_can_be() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(8) == (1, 2, 4, 8)
    assert graph_sizes(9) == (1, 2, 4, 8, 9)


def test_tokens_are_captured_in_steps_of_a_half_and_a_third_and_the_most_there_can_be() -> None:
    assert segment_sizes(20) == (20,)
    assert segment_sizes(100) == (32, 48, 64, 96, 100)
    assert segment_sizes(512) == (32, 48, 64, 96, 128, 192, 256, 384, 512)
    assert segment_sizes(100_000)[-1] == 4096


def test_what_cannot_be_captured_is_refused_with_the_reason() -> None:
    model = tiny_causal_lm(tiny_model("qwen3_moe"))
    assert "CUDA" in str(graph_refusal(model, None, torch.device("cpu")))
    assert "native" in str(graph_refusal(model, None, torch.device("cuda")))


def test_the_engine_says_why_there_are_no_graphs() -> None:
    model = tiny_causal_lm(tiny_model("qwen3_moe"))
    for asked, reason in ((True, "CUDA"), (False, "switched off")):
        feature = EngineCore(model, EngineConfig(num_kv_blocks=8, cuda_graphs=asked)).features()["cuda_graphs"]
        assert (feature["requested"], feature["active"]) == (asked, False)
        assert reason in feature["reason"]
