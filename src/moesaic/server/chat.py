"""``POST /v1/chat/completions``: a conversation rendered with the model's own template."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moesaic.engine.outputs import TextDelta
from moesaic.errors import RequestError
from moesaic.request import RequestOutput, TokenLogprobs
from moesaic.server.answer import AnswerReader
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
    FunctionCall,
    ToolCall,
    Usage,
)
from moesaic.server.routing import encoded_npy
from moesaic.server.served_model import EncodedPrompt, ServedModel


class ChatWriter:
    """The reply to one chat request."""

    def __init__(self, body: ChatCompletionRequest, model: ServedModel, prompt: EncodedPrompt) -> None:
        """Raises: ``RequestError`` for parameters out of range."""
        self.body = body
        self._model = model
        self._prompt = prompt
        messages = body.template_messages()
        self._reasoning_begun = model.chat.reasoning_begun(prompt.text or "", messages, body.rendering())
        changed = self._changed_params()
        self.submissions = [
            body.submission(prompt.token_ids, prompt.text, replace(params, **changed))
            for params in body.params_per_choice(model.defaults)
        ]
        self._readers: dict[int, AnswerReader] = {}
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
        if body.uses_tools:
            model.chat.check_tools()
        if body.chat_template is not None and not model.trust_request_chat_template:
            raise RequestError(
                "chat_template is set but this server renders its model's own; "
                "leave it out or start with --trust-request-chat-template",
                param="chat_template",
            )
        return cls(body, model, await model.encode_chat(body.template_messages(), body.rendering()))

    def _changed_params(self) -> dict[str, Any]:
        """Return what the format of the model's chats changes in ``SamplingParams`` (Any: of several types)."""
        chat, body = self._model.chat, self.body
        wanted = body.structured_output()
        if body.must_call and chat.tools is not None:
            wanted = chat.tools.required(
                body.callable_tools(),
                is_parallel=body.parallel_tool_calls is not False,
                added_ids=chat.added_ids,
            )
        if wanted is not None:
            wanted = replace(wanted, **chat.after_reasoning(wanted, self._reasoning_begun))
        visible = chat.visible_special_ids(parses_tools=body.uses_tools)
        return {"structured_output": wanted, "visible_special_token_ids": visible}

    def _reader(self, index: int) -> AnswerReader:
        if index not in self._readers:
            self._readers[index] = AnswerReader(
                self._model.chat, reasoning_begun=self._reasoning_begun, parses_tools=self.body.uses_tools
            )
        return self._readers[index]

    def chunks(self, index: int, delta: TextDelta) -> list[ChatChunk]:
        first = [] if index in self._begun else [self._opening(index)]
        self._begun.add(index)
        reader = self._reader(index)
        news = reader.feed(delta.text, is_last=delta.finish_reason is not None)
        choice = ChatChunkChoice(
            index=index,
            delta=news,
            logprobs=self._logprobs(delta.logprobs),
            finish_reason=_finish_reason(delta.finish_reason, reader),
        )
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        if self.body.return_token_ids:
            choice.token_ids = list(delta.token_ids)
        if delta.output is not None and delta.output.routed_experts is not None:
            choice.routed_experts = encoded_npy(delta.output.routed_experts)
        has_news = news.model_fields_set or choice.logprobs or choice.token_ids or choice.finish_reason
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
        reader = self._reader(index)
        answer = reader.feed(output.text, is_last=True)
        choice = ChatChoice(
            index=index,
            message=_message(answer),
            logprobs=self._logprobs(output.logprobs),
            finish_reason=_finish_reason(output.finish_reason, reader),
            stop_reason=output.stop_reason,
        )
        if self.body.return_token_ids:
            choice.token_ids = list(output.token_ids)
        if output.routed_experts is not None:
            choice.routed_experts = encoded_npy(output.routed_experts)
        return choice

    def _logprobs(self, scores: Sequence[TokenLogprobs] | None) -> ChatLogprobs | None:
        return chat_logprobs(self._model.vocabulary, scores) if self.body.logprobs and scores is not None else None


def _message(answer: ChatDelta) -> ChatReplyMessage:
    """Return the message of a whole answer, given as one delta."""
    content = answer.content or ("" if not answer.tool_calls else None)
    message = ChatReplyMessage(role="assistant", content=content)
    if answer.reasoning_content:
        message.reasoning_content = answer.reasoning_content
    if answer.tool_calls:
        message.tool_calls = [
            ToolCall(
                id=call.id,
                type="function",
                function=FunctionCall(name=call.function.name, arguments=call.function.arguments),
            )
            for call in answer.tool_calls
        ]
    return message


def _finish_reason(reason: str | None, reader: AnswerReader) -> str | None:
    """Return ``tool_calls`` for an answer that ended by itself and calls tools; one that was cut short says so."""
    return "tool_calls" if reason == "stop" and reader.num_calls else reason
