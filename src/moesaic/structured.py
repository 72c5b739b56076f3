"""What an output must look like: a grammar as plain text. No torch, no compiled object: it crosses processes."""

import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

from moesaic.errors import RequestError

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]

MAX_GRAMMAR_BYTES = 128 * 1024
"""Largest text of a grammar. Bounds its compilation: 0.5 s for the worst found, 1 ms for common ones (tiny model's
tokenizer, one core of a shared x86 machine, 2026-12-01), and the depth of the compiler's recursion."""

_JSON_WHITE_SPACE = r" |\n[ \t]{0,40}"
"""Between the tokens of JSON: one space, or a new line and its indentation. Without a bound a model may never end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A grammar that the output of one request must match from its first token to its end.

    Raises: ``RequestError`` if the text is empty or too long, or no JSON where it must be.
    """

    kind: GrammarKind
    text: str = ""
    """A JSON schema, a regular expression, a JSON list of texts (choice), or a Lark grammar; empty for json_object."""
    after: str | None = None
    """The grammar begins after this text, which any text may precede: the end of a reasoning such as ``</think>``."""
    opening: str | None = None
    """With ``after``: the reasoning begins with this text or is left out; None if the prompt has begun it."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise _refused(f"has the kind {self.kind!r}; kinds are {', '.join(get_args(GrammarKind))}")
        if (self.kind == "json_object") != (not self.text):
            raise _refused(f"of kind {self.kind} has {'a text; leave it out' if self.text else 'no text; give one'}")
        try:
            num_bytes = len(self.text.encode())
        except UnicodeEncodeError as error:  # JSON can write half a surrogate pair
            raise _refused(f"is no Unicode text: {error}") from error
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise _refused(f"has {num_bytes} bytes; it may have {MAX_GRAMMAR_BYTES}; make it smaller")
        if self.kind in ("json_schema", "choice"):
            self._check_json()
        if self.opening is not None and self.after is None:
            raise _refused("has an opening but no end of the reasoning; set after as well")

    def _check_json(self) -> None:
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise _refused(f"of kind {self.kind} is no JSON: {error}") from error
        if self.kind == "json_schema" and not isinstance(value, dict | bool):
            raise _refused(f"is the schema {value!r:.80}; a schema is an object")
        if self.kind == "choice":
            is_texts = isinstance(value, list) and all(isinstance(entry, str) and entry for entry in value)
            if not is_texts or not value:
                raise _refused("has choices that are no list of texts; give at least one text, and no empty one")


def _refused(reason: str) -> RequestError:
    return RequestError(f"structured_output {reason}", param="structured_output")


def bounded_schema(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """Return a schema (Any: JSON values) with bounded white space, unless its own ``x-guidance`` says otherwise."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return {"x-guidance": {"whitespace_pattern": _JSON_WHITE_SPACE}, **schema}
