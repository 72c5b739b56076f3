"""Who talks in the demonstration: short questions, and a document with a question about it."""

from dataclasses import dataclass
from importlib import resources
from typing import Any

from moesaic.bench.timeline import Ask, Scenario
from moesaic.errors import ConfigError, RequestError

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Why is the sky blue?",
    "How do plants make their food?",
    "What causes the seasons on Earth?",
    "What is the water cycle?",
    "Why do we have leap years?",
)
DOCUMENT_QUESTION = "Which rights are unalienable?"
LEAD_IN_TOKENS = 4
"""Tokens that each stream has given when the document arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What the demonstration runs. The defaults take under two minutes with ``smol`` on two cores."""

    model: str = "smol"
    num_streams: int = 6
    max_tokens: int = 40
    """Most output tokens of each stream."""
    document_max_tokens: int = 24
    """Most output tokens of the answer about the document."""
    document_tokens: int = 2048
    """Most tokens of the document's text; a longer one is cut."""
    chunk_size: int = 128

    def __post_init__(self) -> None:
        if not 1 <= self.num_streams <= len(QUESTIONS):
            raise ConfigError(
                f"num_streams is {self.num_streams} but there are {len(QUESTIONS)} questions; "
                f"choose --streams from 1 to {len(QUESTIONS)}"
            )
        if self.max_tokens < LEAD_IN_TOKENS + 2:
            raise ConfigError(
                f"max_tokens is {self.max_tokens} but the document arrives after {LEAD_IN_TOKENS} tokens of each "
                f"stream; raise --max-tokens to at least {LEAD_IN_TOKENS + 2}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A real text and where it is from."""

    title: str
    source: str
    licence: str
    text: str


def load_document() -> Document:
    """Return the document that comes with the package, as one line of text."""
    file = resources.files("moesaic.demo") / "declaration.txt"
    head, _, body = file.read_text(encoding="utf-8").partition("---\n")
    fields = dict(line.split(": ", 1) for line in head.replace("\n ", " ").splitlines())
    return Document(
        title=fields["Title"], source=fields["Source"], licence=fields["Licence"], text=" ".join(body.split())
    )


# Any below: transformers' tokenizers share no typed base class.


def make_scene(tokenizer: Any, settings: DemoSettings) -> Scenario:
    """Return the scenario as token ids, rendered with the model's chat template.

    Raises: ``RequestError`` if the model has no tokenizer or no chat template.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise RequestError(f"model {settings.model!r} has no chat template; choose smol, tiny or another chat model")
    streams = tuple(
        Ask(request_id=f"stream-{i}", prompt_token_ids=_chat(tokenizer, question), max_tokens=settings.max_tokens)
        for i, question in enumerate(QUESTIONS[: settings.num_streams])
    )
    text = _cut(tokenizer, load_document().text, settings.document_tokens)
    late = Ask(
        request_id="document",
        prompt_token_ids=_chat(tokenizer, f"{text}\n\n{DOCUMENT_QUESTION}"),
        max_tokens=settings.document_max_tokens,
    )
    return Scenario(streams=streams, late=late, lead_in_tokens=LEAD_IN_TOKENS)


def _chat(tokenizer: Any, question: str) -> tuple[int, ...]:
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"])


def _cut(tokenizer: Any, text: str, num_tokens: int) -> str:
    """Return the beginning of ``text`` that has at most ``num_tokens`` tokens, up to a whole word."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) <= num_tokens:
        return text
    cut: str = tokenizer.decode(ids[:num_tokens])
    return cut.rpartition(" ")[0] or cut
