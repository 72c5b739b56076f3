"""Offline use: prompts in, answers out."""

import itertools
import sys
import time
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from moesaic.config import EngineConfig, config_fields
from moesaic.engine.core import EngineCore
from moesaic.engine.outputs import OutputProcessor
from moesaic.engine.supervisor import StepSupervisor
from moesaic.errors import ConfigError, RequestError
from moesaic.models.files import load_tokenizer, resolve_model_path
from moesaic.request import RequestOutput, SamplingParams

Prompt = str | SequenceOf[int]


class LLM:
    """A model ready to answer: ``LLM("smol", enable_chunked_prefill=True).generate("Hello")``.

    ``model`` is a local directory, a hub id, or built in (``smol``, ``tiny``); ``settings`` are the fields of
    ``EngineConfig``. Text needs a tokenizer in the model's directory; token ids do not.
    Raises: ``ConfigError``, ``ModelLoadError``, both before the model is allocated where that can be known.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:  # Any: checked by EngineConfig
        config = _config(settings)
        path = resolve_model_path(str(model))
        self.tokenizer = load_tokenizer(path)
        self.engine = EngineCore.from_path(path, config)
        self._supervisor = StepSupervisor(self.engine)
        self._outputs = OutputProcessor(self.tokenizer)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return one answer per prompt, in order; a prompt is text or a list of token ids.

        ``sampling_params`` are one for all or one per prompt. A bad prompt is refused before any of them runs. An
        answer whose step failed has the ``finish_reason`` "error" and says why in ``error``; the others go on.
        Raises: ``RequestError``; ``EngineDeadError`` if too many steps in a row failed.
        """
        batch = _as_batch(prompts)
        params = _params_per_prompt(sampling_params, len(batch))
        ids: list[str] = []
        try:
            for prompt, one in zip(batch, params, strict=True):
                ids.append(self._add(prompt, one))
            return self._finish(ids, use_tqdm)
        except BaseException:
            self._abandon(ids)
            raise

    def chat(
        self,
        messages: SequenceOf[dict[str, str]],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = False,
    ) -> RequestOutput:
        """Return the answer to one conversation, rendered with the model's own chat template.

        Raises: ``RequestError`` if the model has no chat template.
        """
        return self.generate([self.render_chat(messages)], sampling_params, use_tqdm=use_tqdm)[0]

    def render_chat(self, messages: SequenceOf[dict[str, str]]) -> list[int]:
        """Return the token ids of a conversation that the assistant is to continue.

        Raises: ``RequestError`` if the model has no chat template.
        """
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise RequestError("this model has no chat template; send a plain prompt", param="messages")
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def stats(self) -> dict[str, Any]:
        """Return the engine's counts and gauges (Any: JSON values)."""
        return self._supervisor.stats()

    def _add(self, prompt: Prompt, params: SamplingParams) -> str:
        request_id = str(next(self._ids))
        token_ids = self._tokenize(prompt) if isinstance(prompt, str) else prompt
        self.engine.add_request(request_id, token_ids, params)
        text = prompt if isinstance(prompt, str) else None
        try:
            self._outputs.add(request_id, text, tuple(token_ids), params, time.monotonic())
        except RequestError:
            self.engine.abort_request(request_id)
            raise
        return request_id

    def _tokenize(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; send lists of token ids", param="prompt")
        return [int(i) for i in self.tokenizer(prompt)["input_ids"]]

    def _finish(self, ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        with tqdm(total=len(ids), desc="requests", unit="req", disable=not use_tqdm, file=sys.stderr) as bar:
            while len(done) < len(ids):
                step = self._outputs.process(self._supervisor.step(), time.monotonic())
                self.engine.check_alive()
                for request_id in step.aborts:
                    self.engine.abort_request(request_id)
                for delta in step.deltas:
                    if delta.output is not None:
                        done[delta.request_id] = delta.output
                        bar.update()
        return [done[i] for i in ids]

    def _abandon(self, ids: list[str]) -> None:
        """Leave no trace of requests that will not be finished (their terminal events are dropped)."""
        for request_id in ids:
            self.engine.abort_request(request_id)
            self._outputs.finish(request_id, "abort", time.monotonic())
        self.engine.scheduler.take_events()


def _config(settings: dict[str, Any]) -> EngineConfig:
    known = [f.name for f in config_fields()]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}; settings are {', '.join(known)}")
    return EngineConfig(**settings)


def _as_batch(prompts: Any) -> list[Prompt]:  # Any: this is where a caller's input is told apart
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def _params_per_prompt(
    params: SamplingParams | SequenceOf[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise RequestError(f"{len(params)} sampling params for {num_prompts} prompts; pass one or one per prompt")
    return list(params)
