"""What langchain-openai gets: one JSON object on stdout. Usage: python langchain_client.py URL"""

import json
import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """A small schema that any model can be held to."""

    ok: bool


def main() -> None:
    """Chat, stream and structured output."""
    url = sys.argv[1]
    model = ChatOpenAI(
        base_url=url,
        api_key="none",
        model="tiny",
        temperature=0,
        max_tokens=12,
        max_retries=0,
        stream_usage=True,
    )
    chunks = list(model.stream("Hello"))
    usage = next(c.usage_metadata for c in reversed(chunks) if c.usage_metadata)
    roomy = model.model_copy(update={"max_tokens": 60})
    answer = roomy.with_structured_output(Answer, method="json_schema").invoke("Hello")
    result = {
        "chat": model.invoke("Hello").content,
        "streamed": "".join(str(c.content) for c in chunks),
        "usage": usage["output_tokens"],
        "ok_is_bool": isinstance(answer.ok, bool),
    }
    sys.stdout.write(json.dumps(result))


main()
