"""The fields of a request that ask for a grammar: OpenAI's ``response_format`` and vLLM's ``structured_outputs``."""

import json
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from moesaic.errors import RequestError
from moesaic.structured import GrammarKind, StructuredOutput

Schema = dict[str, Any] | StrictBool
"""A JSON schema (Any: JSON values)."""


class JsonSchemaFormat(BaseModel):
    """OpenAI's wrapping of a schema. ``strict`` false would allow less than what is always done here: enforce it."""

    model_config = ConfigDict(populate_by_name=True)

    name: StrictStr | None = None
    description: StrictStr | None = None
    schema_: Schema = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(BaseModel):
    """What the answer is to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """vLLM's field; one of these. A field that it has and that is not here is refused by name."""

    model_config = ConfigDict(extra="forbid")

    # The names are vLLM's, and pydantic has a method of the name ``json``.
    json_: Schema | StrictStr | None = Field(default=None, alias="json")
    json_object: StrictBool | None = None
    regex: StrictStr | None = None
    choice: list[StrictStr] | None = None
    grammar: StrictStr | None = None


class StructuredFields(BaseModel):
    """Fields of completions and chat alike, of which at most one may ask for a grammar."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | StrictStr | None = None
    guided_regex: StrictStr | None = None
    guided_choice: list[StrictStr] | None = None
    guided_grammar: StrictStr | None = None

    def structured_output(self) -> StructuredOutput | None:
        """Return the grammar that is asked for, or None.

        Raises: ``RequestError`` naming the field: two grammars, or one that cannot be.
        """
        wanted = list(self._wanted())
        if len(wanted) > 1:
            first, second = wanted[0][0], wanted[1][0]
            raise RequestError(f"{first} and {second} both ask for a grammar; leave one out", param=second)
        for param, kind, text in wanted:
            try:
                return StructuredOutput(kind=kind, text=text)
            except RequestError as error:
                raise RequestError(str(error), param=param) from error
        return None

    @property
    def grammar_field(self) -> str | None:
        """The name of the field that asks for a grammar, or None."""
        return next((param for param, _, _ in self._wanted()), None)

    def _wanted(self) -> Iterator[tuple[str, GrammarKind, str]]:
        yield from self._by_response_format()
        vllm = self.structured_outputs or StructuredOutputs()
        if vllm.json_object:
            yield "structured_outputs", "json_object", ""
        for field, schema, regex, choice, grammar in (
            ("structured_outputs", vllm.json_, vllm.regex, vllm.choice, vllm.grammar),
            (None, self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar),
        ):
            if schema is not None:
                yield field or "guided_json", "json_schema", schema if isinstance(schema, str) else json.dumps(schema)
            if regex is not None:
                yield field or "guided_regex", "regex", regex
            if choice is not None:
                yield field or "guided_choice", "choice", json.dumps(choice)
            if grammar is not None:
                yield field or "guided_grammar", "grammar", grammar

    def _by_response_format(self) -> Iterator[tuple[str, GrammarKind, str]]:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return
        if wanted.type == "json_object":
            yield "response_format", "json_object", ""
        elif wanted.json_schema is None:
            raise RequestError("response_format has no json_schema; give one", param="response_format")
        else:
            yield "response_format", "json_schema", json.dumps(wanted.json_schema.schema_)
