"""Which tokens each request's grammar allows next. The grammars themselves are llguidance's work.

Where a matcher stands is a function of the committed output tokens alone: it reads, just before a mask is needed, those
that it has not read yet. So a step that fails moves nothing, preemption keeps everything, and there is no undo.
"""

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import RequestError, SamplingError
from moesaic.sampling.row import SamplingRow
from moesaic.structured import StructuredOutput, bounded_schema

logger = logging.getLogger(__name__)

# Any below: tokenizers of transformers have no types.
LoadTokenizer = Callable[[], Any]
"""Returns the model's tokenizer or None; called when the first grammar comes, and once if it has a tokenizer."""

_CACHED = 32
"""Grammars kept compiled: the choices of one request and the requests of one client share theirs."""
_COMPILER_STACK_BYTES = 256 * 2**20
"""The compiler recurses along references; 3000 of them overflow the usual 8 MiB and end the process (llguidance 1.9.1).

8000, more than ``MAX_GRAMMAR_BYTES`` can hold, pass with this one. It is address space, not memory.
"""
_PARAM = "structured_output"


class Grammars:
    """Owns the matcher of every unfinished request that has a grammar, and the tokenizer they share."""

    def __init__(
        self, *, vocab_size: int, eos_token_ids: tuple[int, ...], load_tokenizer: LoadTokenizer | None = None
    ) -> None:
        """``vocab_size`` is that of the logits; ids that the tokenizer does not have are never allowed."""
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(i for i in eos_token_ids if i < vocab_size)
        self._load_tokenizer = load_tokenizer
        self._tokenizer: _GrammarTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutput, Any] = OrderedDict()
        self._progress: dict[str, _Progress] = {}

    def __len__(self) -> int:
        return len(self._progress)

    def compile(self, wanted: StructuredOutput) -> Any:
        """Return a new matcher for one request; holds nothing for it yet. (Any: llguidance's ``LLMatcher``.)

        The first call makes the tokenizer's trie unless ``prepare`` did: 0.35 s for the 49,152 tokens of ``smol``,
        1.6 s for the 151,669 of Qwen3 (one core of a shared x86 machine, 2026-12-01).
        Raises: ``RequestError`` if the grammar is bad or too complex, or this model's output cannot have one.
        """
        pristine = self._compiled.get(wanted)
        if pristine is None:
            pristine = self._compiled[wanted] = self._compile(wanted)
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(wanted)
        return pristine.deep_copy()

    def prepare(self) -> None:
        """Make the tokenizer's trie now rather than with the first grammar, while nobody waits."""
        try:
            self._shared_tokenizer()
        except RequestError as error:
            logger.info("grammars: refused, %s", error)

    def begin(self, request_id: str, matcher: Any) -> None:
        """Let ``matcher`` rule the output of a request that was admitted."""
        self._progress[request_id] = _Progress(matcher)

    def forget(self, request_id: str) -> None:
        """Drop what a request that is over held; unknown ids change nothing."""
        self._progress.pop(request_id, None)

    def restrict(self, rows: list[SamplingRow], request_ids: SequenceOf[str]) -> list[SamplingRow]:
        """Return ``rows`` with the allowed tokens of those that have a grammar; works on the CPU only.

        Raises: ``SamplingError`` for rows whose grammar gave up (too complex for its limits).
        """
        if not self._progress:
            return rows
        ruled = [(i, p) for i, name in enumerate(request_ids) if (p := self._progress.get(name)) is not None]
        if not ruled:
            return rows
        broken = []
        for i, progress in ruled:
            allowed = progress.allowed(rows[i].output_token_ids, self._vocab_size)
            if allowed is None:
                broken.append(i)
            else:
                rows[i] = rows[i]._replace(allowed_tokens=allowed)
        if broken:
            first = self._progress[request_ids[broken[0]]].error
            message = f"the grammars of rows {broken} gave up, the first with: {first}"
            raise SamplingError(message, rows=tuple(broken), own_fault_rows=tuple(broken))
        return rows

    def _compile(self, wanted: StructuredOutput) -> Any:
        from llguidance import LLMatcher

        tokenizer = self._shared_tokenizer()

        def work() -> Any:
            grammar = json.dumps({"grammars": _grammars_of(wanted, tokenizer.special_ids)})
            return LLMatcher(tokenizer.wrapped, grammar, log_level=0)

        matcher = _on_large_stack(work)
        if isinstance(matcher, BaseException):
            raise RequestError(f"the grammar ({wanted.kind}) is refused: {matcher!r:.500}", param=_PARAM) from matcher
        if matcher.is_error():
            reason = " ".join(str(matcher.get_error()).split())
            raise RequestError(f"the grammar ({wanted.kind}) is refused: {reason:.500}", param=_PARAM)
        return matcher

    def _shared_tokenizer(self) -> "_GrammarTokenizer":
        if self._tokenizer is None:
            tokenizer = None if self._load_tokenizer is None else self._load_tokenizer()
            if tokenizer is None:
                raise RequestError("this model has no tokenizer, so its output can have no grammar", param=_PARAM)
            if not self._eos_token_ids:
                raise RequestError("this model has no end token, so no grammar could end its output", param=_PARAM)
            begun_s = time.monotonic()
            self._tokenizer = _GrammarTokenizer(tokenizer, self._vocab_size, self._eos_token_ids)
            logger.info("grammar tokenizer: vocab=%d seconds=%.2f", self._vocab_size, time.monotonic() - begun_s)
        return self._tokenizer


class _GrammarTokenizer:
    """llguidance's view of a tokenizer, as wide as the logits."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        from llguidance.hf import from_tokenizer

        try:
            self.wrapped = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except ValueError as error:  # a tokenizer in pure Python, or one with more ids than the logits
            raise RequestError(f"this model's tokenizer can have no grammar: {error}", param=_PARAM) from error
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        # llguidance's own judgement: it takes <tool_call> of Qwen3 for special although the tokenizer does not.
        self.special_ids = {token.content: i for i, token in added.items() if self.wrapped.is_special_token(i)}


class _Progress:
    """One request's matcher and how many output tokens it has read."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._num_read = 0

    @property
    def error(self) -> str:
        return str(self._matcher.get_error())

    def allowed(
        self, output_token_ids: SequenceOf[int] | NDArray[np.int64], vocab_size: int
    ) -> NDArray[np.uint8] | None:
        """Return the tokens that may come next as bits, ``ceil(V / 32) * 4`` bytes; None if the matcher gave up."""
        new = [int(i) for i in output_token_ids[self._num_read :]]
        if new:
            self._matcher.consume_tokens(new)
            self._num_read += len(new)
        words = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
        # The library's own helpers write through this call too. In an error state it would allow the end only.
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return None if self._matcher.is_error() else words.view(np.uint8)


def _grammars_of(wanted: StructuredOutput, special_ids: dict[str, int]) -> list[dict[str, Any]]:
    """Return llguidance's list of grammars: the first is where it starts."""
    body = _body(wanted)
    if wanted.after is None:
        return [body]
    return [{"lark_grammar": _reasoning(wanted.after, wanted.opening, special_ids)}, {"name": "body", **body}]


def _body(wanted: StructuredOutput) -> dict[str, Any]:
    match wanted.kind:
        case "json_object":
            return {"json_schema": bounded_schema({"type": "object"})}
        case "json_schema":
            return {"json_schema": bounded_schema(json.loads(wanted.text))}
        case "regex":
            entry: dict[str, Any] = json.loads(_matcher_class().grammar_from_regex(wanted.text))["grammars"][0]
            return {"lark_grammar": entry["lark_grammar"]}
        case "choice":
            return {"lark_grammar": "start: " + " | ".join(lark_text(c) for c in json.loads(wanted.text))}
        case "grammar":
            return {"lark_grammar": wanted.text}


def _matcher_class() -> Any:
    from llguidance import LLMatcher

    return LLMatcher


def _reasoning(after: str, opening: str | None, special_ids: dict[str, int]) -> str:
    """Return the Lark rules for any text up to ``after``, then white space and the grammar named ``body``."""
    if after in special_ids:  # a special token has no text that a rule about text could match
        thinking = f"thinking: /(?s:.*)/ {_lark_token(after, special_ids)}\n"
    else:
        thinking = f"thinking[suffix={lark_text(after)}]: /(?s:.*)/\n"
    begin = "thinking gap" if opening is None else f"({_lark_token(opening, special_ids)} thinking gap)?"
    return f"start: {begin} @body\n{thinking}gap: /[ \\n]{{0,8}}/\n"


def _lark_token(text: str, special_ids: dict[str, int]) -> str:
    return f"<[{special_ids[text]}]>" if text in special_ids else lark_text(text)


def lark_text(text: str) -> str:
    """Return ``text`` as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def _on_large_stack(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns or raises, done in a thread with a large stack; blocks."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # noqa: BLE001  # a panic of the compiler is no Exception, and must not end the engine
            result.append(error)

    before = threading.stack_size(_COMPILER_STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name="moesaic-grammar")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return result[0]
