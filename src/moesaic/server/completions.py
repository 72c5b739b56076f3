"""``POST /v1/completions``: prompts as text or token ids, one choice per prompt and ``n``."""

import time
import uuid
from collections.abc import Sequence

from moesaic.engine.outputs import TextDelta
from moesaic.request import RequestOutput, TokenLogprobs
from moesaic.server.logprobs import CompletionLogprobWriter, prompt_logprobs
from moesaic.server.protocol import CompletionRequest
from moesaic.server.replies import Completion, CompletionChoice, Usage
from moesaic.server.routing import encoded_npy
from moesaic.server.served_model import EncodedPrompt, ServedModel


class CompletionWriter:
    """The reply to one completion request."""

    def __init__(self, body: CompletionRequest, model: ServedModel, prompts: Sequence[EncodedPrompt]) -> None:
        """Raises: ``RequestError`` for parameters out of range."""
        self.body = body
        params = body.params_per_choice(model.defaults)
        self.submissions = [body.submission(prompt.token_ids, prompt.text, one) for prompt in prompts for one in params]
        self._model = model
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created_s = int(time.time())
        self._skips_special = params[0].skip_special_tokens
        self._begun: set[int] = set()
        hidden = model.vocabulary.special_ids if self._skips_special else frozenset()
        self._logprobs = [CompletionLogprobWriter(model.vocabulary, hidden) for _ in self.submissions]

    @classmethod
    async def of(cls, body: CompletionRequest, model: ServedModel) -> "CompletionWriter":
        """Return the writer of a body whose prompts are yet to be tokenised.

        Raises: ``RequestError``, ``UnknownModelError``.
        """
        model.check_name(body.model)
        body.check()
        prompts = [await model.encode(p, add_special_tokens=body.add_special_tokens) for p in body.prompts]
        return cls(body, model, prompts)

    def chunks(self, index: int, delta: TextDelta) -> list[Completion]:
        choice = self._choice(index, delta)
        has_news = choice.text or choice.logprobs or choice.token_ids or choice.finish_reason
        return [self._reply([choice])] if has_news else []

    def usage_chunk(self) -> Completion:
        return self._reply([])

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Completion:
        reply = self._reply([self._choice(index, output) for index, output in enumerate(outputs)])
        reply.usage = usage
        return reply

    def _reply(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self._id,
            object="text_completion",
            created=self._created_s,
            model=self.body.model or self._model.names[0],
            choices=choices,
        )

    def _choice(self, index: int, part: TextDelta | RequestOutput) -> CompletionChoice:
        """Return a part of a choice; the first part has what is told of the prompt."""
        is_first = index not in self._begun
        self._begun.add(index)
        shows_prompt = is_first and bool(self.body.echo)
        choice = CompletionChoice(
            index=index,
            text=(self._prompt_text(index) if shows_prompt else "") + part.text,
            logprobs=None,
            finish_reason=part.finish_reason,
        )
        self._add_logprobs(choice, part, shows_prompt)
        if part.finish_reason is not None:
            choice.stop_reason = part.stop_reason
        output = part.output if isinstance(part, TextDelta) else part
        if output is not None and output.routed_experts is not None:
            choice.routed_experts = encoded_npy(output.routed_experts)
        if self.body.return_token_ids:
            choice.token_ids = list(part.token_ids)
            if is_first:
                choice.prompt_token_ids = list(self.submissions[index].prompt_token_ids)
        return choice

    def _prompt_text(self, index: int) -> str:
        submission = self.submissions[index]
        if submission.prompt is not None:
            return submission.prompt
        return self._model.decode(submission.prompt_token_ids, skip_special_tokens=self._skips_special)

    def _add_logprobs(self, choice: CompletionChoice, part: TextDelta | RequestOutput, shows_prompt: bool) -> None:
        if self.body.logprobs is not None:
            token_ids: tuple[int, ...] = part.token_ids
            scores: tuple[TokenLogprobs | None, ...] = part.logprobs or ()
            if shows_prompt:
                token_ids = (*self.submissions[choice.index].prompt_token_ids, *token_ids)
                scores = (*(part.prompt_logprobs or ()), *scores)
            choice.logprobs = self._logprobs[choice.index].write(token_ids, scores)
        if self.body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._model.vocabulary, part.prompt_logprobs or ())
