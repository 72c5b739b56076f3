"""What a client asked and what it gets: immutable values, no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import RequestError
from moesaic.structured import StructuredOutput

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 50
"""Largest ``logprobs`` a request may ask for; bounds the work and the reply per token."""
_SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "routed_experts", "prompt_progress")
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the output tokens of one request.

    Raises: ``RequestError`` naming the field, its value, its range and the remedy.
    """

    max_tokens: int | None = 16
    """Most output tokens; None means up to the end of the context; 0 computes the prompt only."""
    min_tokens: int = 0
    """No EOS and no stop before this many output tokens."""
    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest; in [0, 1]."""
    seed: int | None = None
    """Makes the choice a function of the seed and the output position alone."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output; > 0."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the output; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from the logit of each token in the output; in [-2, 2]."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids; values in [-100, 100]."""
    allowed_token_ids: Sequence[int] | None = None
    """The only token ids that may be chosen, the model's EOS ids among them if the output is to end by itself."""
    stop: str | Sequence[str] = ()
    """Strings that end the output; the text before the first of them is kept."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the output, besides the model's own EOS ids."""
    include_stop_str_in_output: bool = False
    """Keep the matched stop string at the end of the text."""
    ignore_eos: bool = False
    """Go on after the model's EOS ids (``stop_token_ids`` still stop)."""
    logprobs: int | None = None
    """Report the log probability of each output token and of this many likeliest ones."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    visible_special_token_ids: Sequence[int] = ()
    """Special tokens that stay in the text all the same; tool calls begin with such tokens in some models."""
    structured_output: StructuredOutput | None = None
    """A grammar that the output must match; not with ``min_tokens`` or ``ignore_eos``, since it says where to end."""
    routed_experts: bool = False
    """Report which experts each computed token was routed to."""
    prompt_progress: bool = False
    """Tell after each part of the prompt but the last how much of it is computed."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple_of("stop", stop, str))
        for name in ("stop_token_ids", "visible_special_token_ids"):
            object.__setattr__(self, name, _tuple_of(name, getattr(self, name), int))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _tuple_of("allowed_token_ids", self.allowed_token_ids, int))
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty: nothing could be chosen", param="allowed_token_ids")
        if "" in self.stop:
            raise RequestError("stop contains an empty string, which would match at once; remove it", param="stop")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        self._check_counts()
        self._check_ranges()
        if self.structured_output is not None:
            self._check_structured_output()

    def _check_structured_output(self) -> None:
        if not isinstance(self.structured_output, StructuredOutput):
            kind = type(self.structured_output).__name__
            raise RequestError(f"structured_output is {kind}; pass StructuredOutput(...)", param="structured_output")
        for name in ("min_tokens", "ignore_eos"):
            if value := getattr(self, name):
                raise RequestError(
                    f"{name} is {value} but the grammar of a structured output says where it ends; leave {name} out",
                    param=name,
                )

    def _check_counts(self) -> None:
        for name, optional, low, high in (
            ("max_tokens", True, 0, None),
            ("min_tokens", False, 0, None),
            ("top_k", False, -1, None),
            ("seed", True, None, None),
            ("logprobs", True, 0, MAX_LOGPROBS),
            ("prompt_logprobs", True, 0, MAX_LOGPROBS),
        ):
            _check_int(name, getattr(self, name), optional=optional, low=low, high=high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}; lower min_tokens",
                param="min_tokens",
            )

    def _check_ranges(self) -> None:
        _check_float("temperature", self.temperature, low=0.0)
        _check_float("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        _check_float("repetition_penalty", self.repetition_penalty, low=0.0, open_low=True)
        _check_float("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_float("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be true or false", param=name)

    @property
    def tells_of_prompt(self) -> bool:
        """Whether something is told of each prompt token, so that each must be computed for this request."""
        return self.prompt_logprobs is not None or self.routed_experts

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether the logits are changed before a token is chosen (a grammar aside)."""
        return (
            self.min_tokens > 0
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.logit_bias is not None
            or self.allowed_token_ids is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as the engine takes it: token ids, never text."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    priority: int = 0
    """Lower goes first, under the scheduling policy ``priority``."""
    sibling_of: str | None = None
    """An unfinished request with the same prompt, whose KV of the prompt this one begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities at one position (natural log, of the distribution before sampling filters)."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token."""
    top: tuple[tuple[int, float], ...]
    """(token id, log probability), likeliest first; empty if 0 were asked for."""


class RoutedTokens(NamedTuple):
    """Expert ids of consecutive tokens, of every layer that has experts, in values that messages can carry."""

    num_tokens: int
    num_layers: int
    num_experts_per_token: int
    ids: bytes
    """int16, little endian, in the order of ``array``."""

    @classmethod
    def of(cls, array: NDArray[np.int16]) -> "RoutedTokens":
        """Return the value for ids [tokens, layers, experts per token]."""
        num_tokens, num_layers, num_experts = array.shape
        return cls(num_tokens, num_layers, num_experts, array.astype("<i2").tobytes())

    @classmethod
    def joined(cls, parts: Sequence["RoutedTokens"]) -> "RoutedTokens":
        """Return one value for ``parts``, of one model and at least one."""
        num_tokens = sum(part.num_tokens for part in parts)
        return parts[0]._replace(num_tokens=num_tokens, ids=b"".join(part.ids for part in parts))

    def array(self) -> NDArray[np.int16]:
        """Return the ids [tokens, layers, experts per token], read-only."""
        shape = self.num_tokens, self.num_layers, self.num_experts_per_token
        return np.frombuffer(self.ids, dtype="<i2").reshape(shape)


class StepOutput(NamedTuple):
    """What one step gave one request. Progress-only rows give none but to those who ask for ``prompt_progress``.

    A named tuple, not a dataclass: 256 of them are built in each step.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or string that ended the output; None for EOS and length."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per new token, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One per prompt token (None for the first), with the first output only, if asked for."""
    error: str | None = None
    """Why the request failed, with ``finish_reason`` "error" or "timeout"; says nothing of other requests."""
    routed_experts: RoutedTokens | None = None
    """Of the tokens computed since the output before, if asked for."""
    num_computed_prompt_tokens: int | None = None
    """So many are done, if a step computed a part of the prompt, not its end, and ``prompt_progress`` was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times of one request in seconds of a monotonic clock, and its counts."""

    arrival_s: float
    first_token_s: float | None
    finished_s: float
    num_output_tokens: int
    largest_itl_s: float | None
    """The stall: the largest gap between two output tokens; None with fewer than two tokens."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The finished answer to one request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    routed_experts: RoutedTokens | None = None
    """Of the prompt and all output tokens but the last, which the model never read, if asked for."""
    error: str | None = None
    """Why there is no whole answer, with ``finish_reason`` "error" or "timeout"."""
    metrics: RequestMetrics = field(repr=False)


def _tuple_of(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    # Any: the caller may hand us whatever a client sent; this is where it is checked.
    is_list = isinstance(values, Sequence | set | frozenset) and not isinstance(values, str | bytes)
    if not is_list or any(not isinstance(v, kind) or isinstance(v, bool) for v in values):
        raise RequestError(f"{name} is {values!r}; it must be a list of {kind.__name__}", param=name)
    for value in values:
        if kind is int:
            check_int64(name, value)
        elif not _is_text(value):
            raise RequestError(f"{name} has half of a surrogate pair, which is no character; remove it", param=name)
    return tuple(values)


def check_int64(name: str, value: int) -> None:
    """Return if ``value`` is one that tensors and messages can carry.

    Raises: ``RequestError`` naming the field.
    """
    if value not in _INT64:
        raise RequestError(f"{name} has a number of {value.bit_length()} bits; 63 and a sign are the most", param=name)


def _is_text(value: str) -> bool:
    """Return whether ``value`` can be written as UTF-8; JSON can spell text that cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias is {bias!r}; it must map token ids to numbers", param="logit_bias")
    for token_id, value in bias.items():
        _check_int("logit_bias", token_id, optional=False, low=0, high=None)
        _check_float("logit_bias", value, low=-100.0, high=100.0)
    return {int(k): float(v) for k, v in bias.items()}


def _check_int(name: str, value: Any, *, optional: bool, low: int | None, high: int | None) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; it must be an integer", param=name)
    check_int64(name, value)
    if (low is not None and value < low) or (high is not None and value > high):
        at_most = "" if high is None else f" and at most {high}"
        raise RequestError(f"{name} is {value}; it must be at least {low}{at_most}", param=name)


def _check_float(name: str, value: Any, *, low: float, high: float = math.inf, open_low: bool = False) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise RequestError(f"{name} is {value!r}; it must be a finite number", param=name)
    if value < low or value > high or (open_low and value == low):
        raise RequestError(f"{name} is {value}; it must be in {'(' if open_low else '['}{low}, {high}]", param=name)
