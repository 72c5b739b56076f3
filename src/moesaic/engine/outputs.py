"""From the engine's token ids to text deltas and finished answers."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from itertools import chain

from moesaic.engine.detokenizer import IncrementalDetokenizer, TokenDecoder, Tokenizer
from moesaic.errors import DuplicateRequestError, RequestError
from moesaic.request import (
    FinishReason,
    RequestMetrics,
    RequestOutput,
    RoutedTokens,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)
from moesaic.sampling.stopping import StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What one step added to one request; the last one carries the whole answer."""

    request_id: str
    text: str
    """Can be empty although there are tokens: half a character, or what may be the start of a stop string."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token id, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    """Why the request failed, with the last delta of one that did."""
    output: RequestOutput | None = None
    """The whole answer, with the last delta."""
    time_s: float = 0.0
    """When it came, by the clock of ``RequestMetrics``."""
    num_computed_prompt_tokens: int | None = None
    """How far the prompt is, if asked for and it is not done; such a delta has no token."""

    @classmethod
    def joined(cls, deltas: SequenceOf["TextDelta"]) -> "TextDelta":
        """Return one delta that tells what ``deltas`` of one request, in their order, told one by one."""
        last = deltas[-1]
        if len(deltas) == 1:
            return last
        scores = [delta.logprobs for delta in deltas if delta.logprobs is not None]
        return replace(
            last,
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
            logprobs=tuple(chain.from_iterable(scores)) if scores else None,
            prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedStep:
    """The text of one step, and the requests that it ended before the engine did."""

    deltas: list[TextDelta] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    """Requests ended by a stop string: the caller passes each to ``engine.abort_request``."""


class OutputProcessor:
    """Owns the text, the stop strings and the times of all unfinished requests. Reads no clock.

    EOS, ``stop_token_ids`` and ``max_tokens`` are the scheduler's; here a request ends by a stop string only.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._decoder = None if tokenizer is None else TokenDecoder(tokenizer)
        self._streams: dict[str, _Stream] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        arrival_s: float,
    ) -> None:
        """Begin a request that arrived at ``arrival_s``, in seconds of the clock that all other calls use.

        Raises: ``DuplicateRequestError`` if the id is in use; ``RequestError`` for stop strings without tokenizer.
        """
        if request_id in self._streams:
            raise DuplicateRequestError(f"request id {request_id!r} is in use by an unfinished request; choose another")
        self.check_params(params)
        prompt_ids = tuple(prompt_token_ids)
        self._streams[request_id] = _Stream(request_id, prompt, prompt_ids, params, arrival_s, self._decoder)

    def clear(self) -> None:
        """Forget every request: their engine is gone."""
        self._streams.clear()

    def check_params(self, params: SamplingParams) -> None:
        """Return if the text that ``params`` need can be made; reads nothing that changes, so any thread may ask.

        Raises: ``RequestError``.
        """
        if params.stop and self._decoder is None:
            raise RequestError(
                f"stop is {list(params.stop)} but this model has no tokenizer, so there is no text to search; "
                "use stop_token_ids",
                param="stop",
            )

    def process(self, step_outputs: Iterable[StepOutput], now_s: float) -> ProcessedStep:
        """Return the deltas of one step in its order; outputs of requests that have ended here are dropped."""
        step = ProcessedStep()
        for output in step_outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            delta = stream.take(output, now_s)
            step.deltas.append(delta)
            if delta.finish_reason is not None:
                del self._streams[output.request_id]
                if output.finish_reason is None:
                    step.aborts.append(output.request_id)
        return step

    def finish(self, request_id: str, reason: FinishReason, now_s: float) -> TextDelta | None:
        """End a request from outside (a client that left, a dead engine) and return its last delta.

        None if the request has already ended: safe to call twice.
        """
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return None
        return stream.take(StepOutput(request_id=request_id, new_token_ids=(), finish_reason=reason), now_s)


class _Stream:
    """Text and times of one unfinished request."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        arrival_s: float,
        decoder: TokenDecoder | None,
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._params = params
        self._detokenizer: IncrementalDetokenizer | None = None
        if decoder is not None:
            self._detokenizer = IncrementalDetokenizer(
                decoder,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                visible_special_ids=params.visible_special_token_ids,
            )
        self._stops = StopStrings(
            params.stop, include_in_output=params.include_stop_str_in_output, min_tokens=params.min_tokens
        )
        self._times = _TokenTimes(arrival_s)
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._routed: list[RoutedTokens] = []

    def take(self, output: StepOutput, now_s: float) -> TextDelta:
        """Add one step's output and return what it changes; a stop string may cut it short and end the request."""
        num_before = len(self._token_ids)
        text = self._read(output)
        token_ids = tuple(self._token_ids[num_before:])
        self._times.add(len(token_ids), now_s)
        logprobs = None if output.logprobs is None else output.logprobs[: len(token_ids)]
        self._logprobs += logprobs or ()
        self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs
        if output.routed_experts is not None:
            self._routed.append(output.routed_experts)
        self._texts.append(text)
        reason, stop_reason = output.finish_reason, output.stop_reason
        error = output.error
        if self._stops.matched is not None:
            reason, stop_reason, error = "stop", self._stops.matched, None
        return TextDelta(
            request_id=self._request_id,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
            output=None if reason is None else self._output(reason, stop_reason, error, now_s),
            time_s=now_s,
            num_computed_prompt_tokens=output.num_computed_prompt_tokens,
        )

    def _read(self, output: StepOutput) -> str:
        """Take the new tokens up to the one that completes a stop string and return the text that they let out."""
        shown = []
        hides_last = self._is_hidden_stop(output)
        last = len(output.new_token_ids) - 1
        for i, token_id in enumerate(output.new_token_ids):
            self._token_ids.append(token_id)
            text = "" if hides_last and i == last else self._decoded(token_id)
            shown.append(self._stops.feed(text, len(self._token_ids)))
            if self._stops.matched is not None:
                return "".join(shown)
        if output.finish_reason is not None:
            rest = self._detokenizer.flush() if self._detokenizer is not None else ""
            shown.append(self._stops.feed(rest, len(self._token_ids)))
            shown.append(self._stops.flush())
        return "".join(shown)

    def _is_hidden_stop(self, output: StepOutput) -> bool:
        """Return whether the last token is one of ``stop_token_ids`` that the text leaves out."""
        by_token = output.finish_reason == "stop" and isinstance(output.stop_reason, int)
        return by_token and not self._params.include_stop_str_in_output

    def _decoded(self, token_id: int) -> str:
        return "" if self._detokenizer is None else self._detokenizer.push((token_id,))

    def _output(
        self, reason: FinishReason, stop_reason: int | str | None, error: str | None, now_s: float
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            token_ids=tuple(self._token_ids),
            text="".join(self._texts),
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=None if self._params.logprobs is None else tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            routed_experts=RoutedTokens.joined(self._routed) if self._routed else None,
            error=error,
            metrics=self._times.metrics(now_s),
        )


class _TokenTimes:
    """When the tokens of one request came, in seconds."""

    def __init__(self, arrival_s: float) -> None:
        self._arrival_s = arrival_s
        self._num_tokens = 0
        self._first_s: float | None = None
        self._last_s = arrival_s
        self._largest_itl_s: float | None = None

    def add(self, num_tokens: int, now_s: float) -> None:
        """Count tokens that came together: only the first of them waited."""
        if num_tokens == 0:
            return
        if self._first_s is None:
            self._first_s = now_s
        else:
            self._largest_itl_s = max(self._largest_itl_s or 0.0, now_s - self._last_s)
        self._last_s = now_s
        self._num_tokens += num_tokens
        if self._num_tokens > 1:
            self._largest_itl_s = self._largest_itl_s or 0.0

    def metrics(self, now_s: float) -> RequestMetrics:
        return RequestMetrics(
            arrival_s=self._arrival_s,
            first_token_s=self._first_s,
            finished_s=now_s,
            num_output_tokens=self._num_tokens,
            largest_itl_s=self._largest_itl_s,
        )
