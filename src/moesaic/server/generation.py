"""From one body to one response: what completions and chat have in common."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from fastapi import Response
from starlette.types import Receive

from moesaic.engine.client import DeltaStream, EngineClient, Submission
from moesaic.engine.outputs import TextDelta
from moesaic.errors import RequestError
from moesaic.request import RequestOutput
from moesaic.server.errors import UnfinishedRequestError
from moesaic.server.protocol import GenerationRequest
from moesaic.server.replies import ChatChunk, ChatCompletion, Completion, PromptProgress, Usage
from moesaic.server.sse import EventStream, while_connected

Chunk = Completion | ChatChunk


class ReplyWriter(Protocol):
    """Puts what the engine gives into the shape of one endpoint; made for one body."""

    @property
    def body(self) -> GenerationRequest:
        """What the client asked."""

    @property
    def submissions(self) -> Sequence[Submission]:
        """One per choice, ``n`` for each prompt in turn; the choice's index is its place here."""

    def chunks(self, index: int, delta: TextDelta) -> Sequence[Chunk]:
        """Return what a stream tells of ``delta``; nothing if it has nothing to show yet."""

    def usage_chunk(self) -> Chunk:
        """Return a chunk without choices."""

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Completion | ChatCompletion:
        """Return the reply to a body that does not stream; ``outputs`` are one per choice."""


class Tally:
    """Which choice a delta is of, and how many tokens there were."""

    def __init__(self, writer: ReplyWriter, request_ids: Sequence[str]) -> None:
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        prompts = writer.submissions[:: writer.body.num_choices]
        self._num_prompt = sum(len(s.prompt_token_ids) for s in prompts)
        self._num_completion = 0

    def take(self, delta: TextDelta) -> int:
        """Count ``delta`` and return the index of its choice.

        Raises: ``UnfinishedRequestError`` if the engine gave the request up.
        """
        if delta.finish_reason in ("abort", "error"):
            reason = f"the engine ended the request without an answer ({delta.finish_reason})"
            raise UnfinishedRequestError(delta.error or reason)
        self._num_completion += len(delta.token_ids)
        return self._index[delta.request_id]

    @property
    def usage(self) -> Usage:
        return Usage.of(self._num_prompt, self._num_completion)


async def respond(writer: ReplyWriter, client: EngineClient, receive: Receive, ping_interval_s: float) -> Response:
    """Return the whole reply or the stream of it; either way a client that leaves frees its requests.

    A stream is returned when its requests are admitted: until then a refusal still has a status of its own.
    Raises: ``RequestError``, ``EngineDeadError``, ``UnfinishedRequestError``, ``ClientDisconnect``.
    """
    if writer.body.stream:
        stream = await while_connected(receive, _submit(writer, client))
        return EventStream(_chunks(writer, stream), stream, ping_interval_s)
    reply = await while_connected(receive, _whole(writer, client))
    return Response(reply.json_bytes(), media_type="application/json")


async def _submit(writer: ReplyWriter, client: EngineClient) -> DeltaStream:
    try:
        return await client.submit(*writer.submissions)
    except RequestError as error:
        error.param = writer.body.client_name(error.param)
        raise


async def _whole(writer: ReplyWriter, client: EngineClient) -> Completion | ChatCompletion:
    async with await _submit(writer, client) as stream:
        tally = Tally(writer, stream.request_ids)
        outputs: dict[int, RequestOutput] = {}
        async for delta in stream:
            index = tally.take(delta)
            if delta.output is not None:
                outputs[index] = delta.output
    return writer.whole([outputs[index] for index in sorted(outputs)], tally.usage)


def _news(writer: ReplyWriter, index: int, delta: TextDelta) -> Sequence[Chunk]:
    """Return what a stream tells of ``delta``; how far a prompt is has a chunk of its own, without choices."""
    if delta.num_computed_prompt_tokens is None:
        return writer.chunks(index, delta)
    chunk, total = writer.usage_chunk(), len(writer.submissions[index].prompt_token_ids)
    chunk.prompt_progress = PromptProgress(index=index, processed=delta.num_computed_prompt_tokens, total=total)
    return [chunk]


async def _chunks(writer: ReplyWriter, stream: DeltaStream) -> AsyncGenerator[Chunk, None]:
    body = writer.body
    tally = Tally(writer, stream.request_ids)
    async for delta in stream:
        index = tally.take(delta)
        for chunk in _news(writer, index, delta):
            if body.includes_usage:
                # Set to None it is null in the JSON, as OpenAI's chunks before the last have it.
                chunk.usage = tally.usage if body.includes_running_usage else None
            yield chunk
    if body.includes_usage:
        last = writer.usage_chunk()
        last.usage = tally.usage
        yield last
