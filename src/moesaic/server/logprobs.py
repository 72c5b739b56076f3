"""Log probabilities in the shapes that OpenAI's two endpoints have."""

import codecs
from collections.abc import Sequence
from typing import Any

from moesaic.request import TokenLogprobs
from moesaic.server.replies import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TokenLogprob
from moesaic.server.vocabulary import Vocabulary

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write; other servers send the same number."""


class CompletionLogprobWriter:
    """Writes the tokens of one choice, in as many parts as they come; remembers how long its text is."""

    def __init__(self, vocabulary: Vocabulary, hidden_ids: frozenset[int]) -> None:
        """``hidden_ids`` are tokens that the text leaves out."""
        self._vocabulary = vocabulary
        self._hidden_ids = hidden_ids
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def write(self, token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """Return the next tokens and their scores, one per token; None is the first token of a prompt."""
        return CompletionLogprobs(
            tokens=[self._vocabulary.text_of(i) for i in token_ids],
            token_logprobs=[None if s is None else finite(s.logprob) for s in scores],
            top_logprobs=[None if s is None else self._top(s) for s in scores],
            text_offset=[self._advance(i) for i in token_ids],
        )

    def _top(self, score: TokenLogprobs) -> dict[str, float]:
        """Return the likeliest tokens and the chosen one; of two with one name the likelier."""
        top: dict[str, float] = {}
        for token_id, logprob in (*score.top, (score.token_id, score.logprob)):
            top.setdefault(self._vocabulary.text_of(token_id), finite(logprob))
        return top

    def _advance(self, token_id: int) -> int:
        start = self._offset
        if token_id not in self._hidden_ids:
            self._offset += len(self._characters.decode(self._vocabulary.bytes_of(token_id) or b""))
        return start


def chat_logprobs(vocabulary: Vocabulary, scores: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Return the scores of output tokens as chat shows them."""
    content = []
    for score in scores:
        top = [_chat_token(vocabulary, token_id, logprob) for token_id, logprob in score.top]
        chosen = _chat_token(vocabulary, score.token_id, score.logprob)
        content.append(
            ChatTokenLogprob(token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=top)
        )
    return ChatLogprobs(content=content)


def prompt_logprobs(
    vocabulary: Vocabulary, scores: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:  # Any: JSON values
    """Return one mapping per prompt token, from token id to log probability, rank and text; None for the first."""
    return [None if score is None else _ranked(vocabulary, score) for score in scores]


def finite(logprob: float) -> float:
    """Return ``logprob`` as JSON can write it."""
    return max(logprob, LOWEST)


def _ranked(vocabulary: Vocabulary, score: TokenLogprobs) -> dict[str, Any]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(score.top, start=1)]
    ranked.append((score.token_id, score.logprob, score.rank))
    return {
        str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": vocabulary.text_of(token_id)}
        for token_id, logprob, rank in ranked
    }


def _chat_token(vocabulary: Vocabulary, token_id: int, logprob: float) -> TokenLogprob:
    data = vocabulary.bytes_of(token_id) or b""
    return TokenLogprob(token=vocabulary.text_of(token_id), logprob=finite(logprob), bytes=list(data))
