import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.errors import ModelLoadError
from moesaic.models.files import load_tokenizer
from moesaic.server.served_model import LONG_TEXT_CHARACTERS, ServedModel, read_defaults


def write(path: Path, fields: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(fields), encoding="utf-8")
    return path


def test_the_models_proposals_are_read(tmp_path: Path) -> None:
    fields = {"temperature": 0.7, "top_k": 20, "top_p": None, "eos_token_id": 3, "do_sample": True}
    assert read_defaults(write(tmp_path, fields)) == {"temperature": 0.7, "top_k": 20}


def test_a_model_that_does_not_sample_proposes_nothing(tmp_path: Path) -> None:
    assert read_defaults(write(tmp_path, {"temperature": 0.7, "do_sample": False})) == {}
    assert read_defaults(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("fields", [{"temperature": -1}, {"top_p": "x"}, [1]])
def test_a_proposal_out_of_range_is_named(tmp_path: Path, fields: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        read_defaults(write(tmp_path, fields))


def test_long_and_short_texts_are_tokenised_alike(tiny_dir: Path) -> None:
    model = ServedModel(names=("tiny",), root="tiny", max_model_len=8192, tokenizer=load_tokenizer(tiny_dir))
    text = "ab" * LONG_TEXT_CHARACTERS
    long = asyncio.run(model.encode(text))
    assert (long.token_ids, long.text) == ((97, 98) * LONG_TEXT_CHARACTERS, text)
    chat = asyncio.run(model.encode_chat([{"role": "user", "content": text}]))
    assert len(chat.token_ids) > len(long.token_ids)
