"""``POST /v1/chat/completions``: a conversation rendered with the model's own template."""

import time
import uuid
from collections.abc import Sequence

from moesaic.engine.outputs import TextDelta
from moesaic.request import RequestOutput, TokenLogprobs
from moesaic.server.logprobs import chat_logprobs, prompt_logprobs
from moesaic.server.protocol import ChatCompletionRequest
from moesaic.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatReplyMessage,
    Usage,
)
from moesaic.server.served_model import EncodedPrompt, ServedModel


class ChatWriter:
    """The reply to one chat request."""

    def __init__(self, body: ChatCompletionRequest, model: ServedModel, prompt: EncodedPrompt) -> None:
        """Raises: ``RequestError`` for parameters out of range."""
        self.body = body
        self.submissions = [
            body.submission(prompt.token_ids, prompt.text, params) for params in body.params_per_choice(model.defaults)
        ]
        self._model = model
        self._prompt = prompt
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created_s = int(time.time())
        self._begun: set[int] = set()

    @classmethod
    async def of(cls, body: ChatCompletionRequest, model: ServedModel) -> "ChatWriter":
        """Return the writer of a body whose messages are yet to be rendered.

        Raises: ``RequestError``, ``UnknownModelError``.
        """
        model.check_name(body.model)
        body.check()
        return cls(body, model, await model.encode_chat(body.template_messages()))

    def chunks(self, index: int, delta: TextDelta) -> list[ChatChunk]:
        first = [] if index in self._begun else [self._opening(index)]
        self._begun.add(index)
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=delta.text) if delta.text else ChatDelta(),
            logprobs=self._logprobs(delta.logprobs),
            finish_reason=delta.finish_reason,
        )
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        if self.body.return_token_ids:
            choice.token_ids = list(delta.token_ids)
        has_news = delta.text or choice.logprobs or choice.token_ids or choice.finish_reason
        return [*first, self._chunk([choice])] if has_news else first

    def usage_chunk(self) -> ChatChunk:
        return self._chunk([])

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> ChatCompletion:
        reply = ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created_s,
            model=self._model_name,
            choices=[self._choice(index, output) for index, output in enumerate(outputs)],
            usage=usage,
        )
        if self.body.return_token_ids:
            reply.prompt_token_ids = list(self._prompt.token_ids)
        if self.body.prompt_logprobs is not None:
            reply.prompt_logprobs = prompt_logprobs(self._model.vocabulary, outputs[0].prompt_logprobs or ())
        return reply

    @property
    def _model_name(self) -> str:
        return self.body.model or self._model.names[0]

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created_s,
            model=self._model_name,
            choices=choices,
        )

    def _opening(self, index: int) -> ChatChunk:
        """Return the chunk that names the role. It comes with the first token, so it tells TTFT honestly."""
        delta = ChatDelta(role="assistant", content="")
        chunk = self._chunk([ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)])
        if self.body.return_token_ids:
            chunk.prompt_token_ids = list(self._prompt.token_ids)
        return chunk

    def _choice(self, index: int, output: RequestOutput) -> ChatChoice:
        choice = ChatChoice(
            index=index,
            message=ChatReplyMessage(role="assistant", content=output.text),
            logprobs=self._logprobs(output.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
        if self.body.return_token_ids:
            choice.token_ids = list(output.token_ids)
        return choice

    def _logprobs(self, scores: Sequence[TokenLogprobs] | None) -> ChatLogprobs | None:
        return chat_logprobs(self._model.vocabulary, scores) if self.body.logprobs and scores is not None else None
