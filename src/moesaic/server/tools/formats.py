"""How models write tool calls: the parser of each format, the grammar that enforces it, and which one a model has."""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moesaic.errors import RequestError
from moesaic.server.settings import ToolCallParser
from moesaic.server.tools import hermes, mistral
from moesaic.server.tools.base import ToolParser
from moesaic.server.tools.protocol import Tool
from moesaic.structured import StructuredOutput, bounded_schema


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way to write tool calls."""

    name: str
    make_parser: Callable[[], ToolParser]
    markers: tuple[str, ...]
    """Texts that may be special tokens of the tokenizer, and must be in the text all the same."""
    id_length: int
    """Characters of a call's id."""
    before: str
    """Lark of what stands before all calls; ``marker_0`` is the first marker, and so on, here and below."""
    before_name: str
    before_arguments: str
    after_call: str
    between_calls: str
    after: str
    """Lark of what stands after all calls."""

    def new_id(self) -> str:
        """Return the id of a new call; Mistral's templates take nothing but nine letters or digits."""
        return uuid.uuid4().hex[: self.id_length] if self.id_length < 32 else f"call_{uuid.uuid4().hex}"

    def required(self, tools: Sequence[Tool], *, is_parallel: bool, added_ids: Mapping[str, int]) -> StructuredOutput:
        """Return the grammar of one call, or with ``is_parallel`` one or more, of ``tools`` and nothing else.

        ``added_ids`` are the tokenizer's added tokens by their text. Raises: ``RequestError`` if it is too long.
        """
        rules = [f"start: {' '.join(filter(None, (self.before, self._calls(is_parallel), self.after)))}"]
        rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}")
        for i, tool in enumerate(tools):
            name = json.dumps(tool.function.name)
            rules.append(f"call_{i}: {self.before_name} {name} {self.before_arguments} arguments_{i} {self.after_call}")
            rules.append(f"arguments_{i}: %json {json.dumps(_schema(tool))}")
        for i, marker in enumerate(self.markers):
            # llguidance may or may not take an added token for special, and special tokens have no text.
            token = f"<[{added_ids[marker]}]> | " if marker in added_ids else ""
            rules.append(f"marker_{i}: {token}{json.dumps(marker)}")
        try:
            return StructuredOutput(kind="grammar", text="\n".join(rules))
        except RequestError as error:
            raise RequestError(f"the grammar of all tools is refused: {error}", param="tools") from error

    def _calls(self, is_parallel: bool) -> str:
        return f"call ({self.between_calls} call)*" if is_parallel else "call"


class ToolSelection(NamedTuple):
    """The format of one model, or None, and why."""

    format: ToolFormat | None
    reason: str


HERMES = ToolFormat(
    name="hermes",
    make_parser=hermes.HermesParser,
    markers=(hermes.OPEN, hermes.CLOSE),
    id_length=32,
    before="",
    before_name=r'marker_0 "\n{\"name\": \""',
    before_arguments=r'"\", \"arguments\": "',
    after_call=r'"}\n" marker_1',
    between_calls=r'"\n"',
    after="",
)
_MISTRAL: dict[str, Any] = {"make_parser": mistral.MistralParser, "id_length": 9}
MISTRAL_LIST = ToolFormat(
    name="mistral",
    markers=(mistral.OPEN,),
    before='marker_0 "["',
    before_name=r'"{\"name\": \""',
    before_arguments=r'"\", \"arguments\": "',
    after_call='"}"',
    between_calls='", "',
    after='"]"',
    **_MISTRAL,
)
MISTRAL_NAMED = ToolFormat(
    name="mistral",
    markers=(mistral.OPEN, mistral.ARGUMENTS, mistral.CALL_ID),
    before="",
    before_name="marker_0",
    before_arguments="marker_1",
    after_call="",
    between_calls="",
    after="",
    **_MISTRAL,
)

_OTHER_FORMATS = ("<function=", "<arg_key>")
"""What templates have that use Hermes' tags around something else than JSON."""


def select_format(requested: ToolCallParser, template: str) -> ToolSelection:
    """Return the format that was asked for, or the one that the chat template shows."""
    if requested == "none":
        return ToolSelection(None, "not requested")
    mistral_format = MISTRAL_NAMED if mistral.ARGUMENTS in template else MISTRAL_LIST
    if requested != "auto":
        return ToolSelection(HERMES if requested == "hermes" else mistral_format, "as requested")
    if mistral.OPEN in template:
        return ToolSelection(mistral_format, f"the chat template has {mistral.OPEN}")
    if hermes.OPEN in template and not any(other in template for other in _OTHER_FORMATS):
        return ToolSelection(HERMES, f"the chat template has {hermes.OPEN}")
    return ToolSelection(None, "the chat template shows no format of tool calls that is known here")


def _schema(tool: Tool) -> dict[str, Any]:
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    return bounded_schema(
        nothing if tool.function.parameters is None else {"type": "object", **tool.function.parameters}
    )
