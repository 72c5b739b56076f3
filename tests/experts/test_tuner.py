"""What the tuner tries, finds and writes; it measures on a GPU only (tests/gpu)."""

import dataclasses

import pytest
import torch
from typer.testing import CliRunner

from moesaic.cli import app
from moesaic.errors import ConfigError
from moesaic.experts.tuner import TOKENS, TunedEntry, Tuning, candidates, shapes_to_tune, tune
from moesaic.experts.tuning import ExpertShape, read_table
from moesaic.kernels.tiles import ExpertTiles, Tile
from moesaic.testing.models import tiny_config

SHAPE = ExpertShape(num_experts=128, num_experts_per_token=8, width=2048, inner=768, dtype="bfloat16")


def _tuning(*times: tuple[int, float, float]) -> Tuning:
    """A run that found (tokens, fused microseconds, grouped microseconds)."""
    tiles = ExpertTiles(block_m=16, gate_up=Tile(block_n=32, block_k=64), down=Tile(block_n=64, block_k=64))
    entries = tuple(
        TunedEntry(num_tokens=n, tiles=tiles, time_us=fused, floor_us=1.0, grouped_us=grouped)
        for n, fused, grouped in times
    )
    return Tuning(shape=SHAPE, device="No GPU", date="2026-12-01", versions={}, copy_bytes_per_s=1e12, entries=entries)


def test_fused_kernels_serve_up_to_the_first_size_at_which_they_are_slower() -> None:
    assert _tuning((1, 2.0, 9.0), (8, 8.0, 9.0), (64, 10.0, 9.0), (128, 8.0, 9.0)).max_tokens == 8
    assert _tuning((1, 9.0, 2.0)).max_tokens == 1


def test_what_is_written_is_the_table_that_is_read(tmp_path) -> None:
    tuning = _tuning((1, 2.0, 9.0), (8, 8.0, 9.0))
    table = read_table(tuning.write(tmp_path / "new"))
    assert (table.max_tokens, table.by_tokens) == (8, tuple((e.num_tokens, e.tiles) for e in tuning.entries))
    assert "fused up to 8 tokens" in tuning.text()


def test_a_folder_that_cannot_be_written_is_named(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written .*--output"):
        _tuning((1, 2.0, 9.0)).write(tmp_path / "file")


@pytest.mark.parametrize("chosen_of", [(8, 128), (2, 8), (4, 64), (2, 2)])
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_there_is_something_to_try_for_every_size_and_large_tiles_need_many_rows(num_tokens, chosen_of) -> None:
    chosen, num_experts = chosen_of
    shape = dataclasses.replace(SHAPE, num_experts=num_experts, num_experts_per_token=chosen)
    found = list(candidates(shape, num_tokens))
    assert found
    assert all(block_m <= max(16, 4 * num_tokens * chosen / num_experts) for block_m, *_ in found)
    assert all(num_tokens <= 4 for _, is_pairwise, *_ in found if is_pairwise)


def test_shapes_come_from_a_configuration_alone() -> None:
    (shape,) = shapes_to_tune(tiny_config("qwen3_moe"), torch.bfloat16)
    config = tiny_config("qwen3_moe")
    assert (shape.num_experts, shape.num_experts_per_token) == (config.num_experts, config.num_experts_per_tok)
    assert (shape.width, shape.inner) == (config.hidden_size, config.moe_intermediate_size)


def test_a_family_that_the_kernels_do_not_take_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"gpt_oss has nothing to tune: .*without bias"):
        shapes_to_tune(tiny_config("gpt_oss"), torch.bfloat16)


def test_nothing_is_tuned_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"nothing can be tuned here: .*this is cpu"):
        tune(SHAPE, torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="would tune")
def test_the_command_says_why_it_cannot_tune() -> None:
    done = CliRunner().invoke(app, ["tune", "tiny"])
    assert isinstance(done.exception, ConfigError)
    assert "nothing can be tuned here" in str(done.exception)
