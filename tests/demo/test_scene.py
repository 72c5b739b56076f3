from pathlib import Path

import pytest

from moesaic.demo.scene import DOCUMENT_QUESTION, DemoSettings, load_document, make_scene
from moesaic.errors import ConfigError, RequestError
from moesaic.models.files import load_tokenizer


def test_the_document_is_real_prose_and_says_where_it_is_from() -> None:
    document = load_document()
    assert document.title == "The Declaration of Independence"
    assert document.licence == "public domain"
    assert document.text.startswith("When in the Course of human events")
    assert document.text.endswith("our sacred Honor.")
    assert 1000 < len(document.text.split()) < 2000


def test_a_document_is_cut_to_its_tokens_at_a_whole_word_and_the_question_stays(tiny_dir: Path) -> None:
    tokenizer = load_tokenizer(tiny_dir)
    scenario = make_scene(tokenizer, DemoSettings(model="tiny", document_tokens=100))
    prompt = tokenizer.decode(list(scenario.late.prompt_token_ids))
    assert prompt.startswith("<|im_start|>user\nWhen in the Course")
    assert f"dissolve the political\n\n{DOCUMENT_QUESTION}<|im_end|>" in prompt
    assert len(scenario.streams) == 6


def test_a_model_without_chat_template_is_refused() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        make_scene(None, DemoSettings())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_streams": 7}, "num_streams is 7 but there are 6 questions"),
        ({"num_streams": 0}, "--streams from 1 to 6"),
        ({"max_tokens": 5}, "raise --max-tokens to at least 6"),
    ],
)
def test_impossible_settings_are_refused_with_the_remedy(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DemoSettings(**settings)
