"""``POST /tokenize`` and ``/detokenize``: what the model sees of a text, in the shapes of vLLM's routes."""

from typing import Annotated

from pydantic import BaseModel, Field, StrictBool, StrictInt, StrictStr

from moesaic.errors import RequestError
from moesaic.server.protocol import ChatCompletionRequest, ChatMessage
from moesaic.server.replies import Reply
from moesaic.server.served_model import ServedModel


class TokenizeRequest(BaseModel):
    """The body of ``POST /tokenize``: a text, or messages as a chat renders them."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool = True
    return_token_strs: StrictBool = False


class DetokenizeRequest(BaseModel):
    """The body of ``POST /detokenize``."""

    model: StrictStr | None = None
    tokens: list[StrictInt]


class TokenizeReply(Reply):
    """Token ids, how many, and how many the context holds."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(Reply):
    """The text of token ids, special tokens included."""

    prompt: str


async def tokenize(body: TokenizeRequest, model: ServedModel) -> TokenizeReply:
    """Return the token ids of a text or of rendered messages.

    Raises: ``RequestError`` unless exactly one of them is given, ``UnknownModelError``.
    """
    model.check_name(body.model)
    token_ids = await _token_ids(body, model)
    name_of = model.vocabulary.text_of
    return TokenizeReply(
        count=len(token_ids),
        max_model_len=model.max_model_len,
        tokens=list(token_ids),
        token_strs=[name_of(i) for i in token_ids] if body.return_token_strs else None,
    )


async def _token_ids(body: TokenizeRequest, model: ServedModel) -> tuple[int, ...]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages", param="prompt")
    if body.prompt is not None:
        return (await model.encode(body.prompt, add_special_tokens=body.add_special_tokens)).token_ids
    chat = ChatCompletionRequest(messages=body.messages or [], add_generation_prompt=body.add_generation_prompt)
    return (await model.encode_chat(chat.template_messages(), chat.rendering())).token_ids


def detokenize(body: DetokenizeRequest, model: ServedModel) -> DetokenizeReply:
    """Return the text of token ids.

    Raises: ``RequestError`` for ids that the vocabulary does not have and for a model without tokenizer,
    ``UnknownModelError``.
    """
    model.check_name(body.model)
    if model.tokenizer is None:
        raise RequestError("this model has no tokenizer; there is no text of its token ids", param="tokens")
    size = len(model.tokenizer)
    unknown = [i for i in body.tokens if not 0 <= i < size]
    if unknown:
        raise RequestError(
            f"token id {unknown[0]} is unknown; this tokenizer has ids from 0 to {size - 1}", param="tokens"
        )
    return DetokenizeReply(prompt=model.decode(body.tokens, skip_special_tokens=False))
