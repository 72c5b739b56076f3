"""Text from tokens as they come, without ever showing half a character.

Why not ``tokenizers.decoders.DecodeStream``: it has no flush, so what it holds back is lost when an output ends, and
it decodes a run of invalid bytes again for each of its tokens. It costs 1.3 us a token where this costs 5.5, but
710 us where this costs 10 in a run of 3000 invalid bytes (tokenizers 0.23.3, tokenizer of SmolLM2, best of 15, one
core of a shared x86 machine, 2026-12-01).
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_PROMPT_TOKENS = 32
"""Last prompt tokens looked at for one that has text; special tokens have none."""
_CHARACTER_TOKENS = 3
"""An unfinished character has at most three bytes (UTF-8), so at most three tokens."""
_MOST_HELD_TOKENS = 16
"""More tokens than this are never held back, whatever the tokenizer does."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer: of ``transformers`` or ``tokenizers`` alike."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...


class TokenDecoder:
    """Decodes lists of ids with one tokenizer and knows which of them have no text; made once per tokenizer."""

    def __init__(self, tokenizer: Any) -> None:  # Any: transformers or tokenizers, which share no base class
        fast = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._is_fast = hasattr(fast, "get_added_tokens_decoder")
        self._tokenizer: Any = fast if self._is_fast else tokenizer
        self._special_ids = frozenset(
            (i for i, token in fast.get_added_tokens_decoder().items() if token.special)
            if self._is_fast
            else getattr(tokenizer, "all_special_ids", ())
        )
        self._texts: dict[int, str] = {}

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ``token_ids``, special tokens included, without any cleaning up of spaces."""
        if len(token_ids) != 1:
            return self._decoded(token_ids)
        # Every token is decoded alone once it is shown, and few tokens make most of a text.
        token_id = token_ids[0]
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._decoded(token_ids)
        return text

    def visible(
        self, token_ids: Iterable[int], *, skip_special_tokens: bool, visible_special_ids: SequenceOf[int] = ()
    ) -> list[int]:
        """Return those of ``token_ids`` that have text: ids the tokenizer does not know have none."""
        kept = [
            i
            for i in token_ids
            if not (skip_special_tokens and i in self._special_ids and i not in visible_special_ids)
        ]
        if not self._is_fast:
            return kept
        return [i for i in kept if self._tokenizer.id_to_token(i) is not None]

    def _decoded(self, token_ids: list[int]) -> str:
        if self._is_fast:
            text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        else:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


class IncrementalDetokenizer:
    """The text of one output, piece by piece.

    The pieces add up to what decoding prompt and output together gives after the prompt's text; the prompt decides
    about the space before the first token. Two exceptions, both about invalid UTF-8: if the prompt ends inside a
    character, the rest of that character comes out as U+FFFD; and byte-fallback tokenizers decode a run of byte
    tokens to U+FFFD throughout if any of it is invalid, while characters already shown stay as they were.

        window   [ context, text shown | pending ]     text shown so far ends where pending begins
    """

    def __init__(
        self,
        tokenizer: Tokenizer | TokenDecoder,
        prompt_token_ids: SequenceOf[int] = (),
        *,
        skip_special_tokens: bool = True,
        visible_special_ids: SequenceOf[int] = (),
    ) -> None:
        """Many outputs of one tokenizer should share one ``TokenDecoder``: making it looks at all added tokens."""
        self._decoder = tokenizer if isinstance(tokenizer, TokenDecoder) else TokenDecoder(tokenizer)
        self._skip_special_tokens = skip_special_tokens
        self._visible_special_ids = visible_special_ids
        self._context = self._shortest_context(self._visible(prompt_token_ids[-_PROMPT_TOKENS:]), 1)
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that ``token_ids`` complete; a character still lacking bytes is held back.

        Costs about one decode of a few tokens per token, however long the output.
        """
        return "".join(map(self._push_one, self._visible(token_ids)))

    def flush(self) -> str:
        """Return the text held back, with U+FFFD for bytes that are no character; call it at the end."""
        return self._show(len(self._pending), self._text_after_context(self._pending)) if self._pending else ""

    def _push_one(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._text_after_context(self._pending)
        if not text.endswith(_REPLACEMENT):
            return self._show(len(self._pending), text)
        if len(self._pending) <= _CHARACTER_TOKENS:
            return ""
        return self._show_settled(text)

    def _show_settled(self, whole: str) -> str:
        """Show the pending tokens that no later token can change, given the text of all of them.

        Those before the last three, if the text is the same when it is cut there: then no character is cut.
        """
        num_pending = len(self._pending)
        for num in range(num_pending - _CHARACTER_TOKENS, 0, -1):
            text = self._text_after_context(self._pending[:num])
            if text + self._decode(self._pending[num:]) == whole:
                return self._show(num, text)
        return self._show(num_pending, whole) if num_pending >= _MOST_HELD_TOKENS else ""

    def _show(self, num_tokens: int, text: str) -> str:
        """Return ``text``, which is that of the first pending tokens, and make them the context of the rest."""
        shown = self._pending[:num_tokens]
        del self._pending[:num_tokens]
        self._context_text = self._decode(shown)
        if self._context_text:
            self._context = shown
        else:
            # A space that is stripped at the start of a text: it has no text of its own to go on from.
            self._context = self._shortest_context(self._context + shown, num_tokens)
            self._context_text = self._decode(self._context)
        return text

    def _text_after_context(self, token_ids: list[int]) -> str:
        text = self._decode(self._context + token_ids)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._decode(token_ids)

    def _shortest_context(self, token_ids: list[int], num_least: int) -> list[int]:
        """Return the fewest last tokens, at least ``num_least``, that have text and do not begin inside a character."""
        for num in range(num_least, len(token_ids)):
            text = self._decode(token_ids[-num:])
            if text and not text.startswith(_REPLACEMENT):
                return token_ids[-num:]
        return token_ids

    def _visible(self, token_ids: Iterable[int]) -> list[int]:
        return self._decoder.visible(
            token_ids,
            skip_special_tokens=self._skip_special_tokens,
            visible_special_ids=self._visible_special_ids,
        )

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids) if token_ids else ""
