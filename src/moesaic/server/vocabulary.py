"""The text and the bytes of single tokens, as log probabilities show them."""

import json
import re
from typing import Any

from moesaic.builtin.tokens import byte_alphabet

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what SentencePiece has for a space


class Vocabulary:
    """Names each token id; token by token, so the bytes of an output's tokens add up to its text.

    Without a tokenizer (or for one in pure Python) an id is all there is to show.
    """

    def __init__(self, tokenizer: Any) -> None:  # Any: transformers' tokenizer or None
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", None)
        self._added: dict[int, str] = {}
        self._hidden: frozenset[int] = frozenset()
        self._bytes_of: dict[str, int] = {}
        if self._tokenizer is None:
            return
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self._hidden = frozenset(i for i, token in added.items() if token.special)
        decoder = json.dumps(json.loads(self._tokenizer.to_str()).get("decoder"))
        if '"ByteLevel"' in decoder:
            self._bytes_of = {character: byte for byte, character in enumerate(byte_alphabet())}

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that a text without special tokens leaves out."""
        return self._hidden

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes that a token stands for, or None for an id without text."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = None if self._tokenizer is None else self._tokenizer.id_to_token(token_id)
        if piece is None:
            return None
        if self._bytes_of and all(character in self._bytes_of for character in piece):
            return bytes(self._bytes_of[character] for character in piece)
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        text: str = piece.replace(_SPACE, " ")
        return text.encode()

    def text_of(self, token_id: int) -> str:
        """Return a name that tells the token from others.

        Its text, ``bytes:\\xe2\\x82`` for a part of a character (as OpenAI's completions do), else ``token_id:7``.
        """
        data = self.bytes_of(token_id)
        if data is None:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
