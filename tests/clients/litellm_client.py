"""What litellm gets: one JSON object on stdout. Usage: python litellm_client.py URL"""

import json
import sys
from typing import Any

import litellm

URL = sys.argv[1]
CALL: dict[str, Any] = {
    "model": "openai/tiny",
    "messages": [{"role": "user", "content": "Hello"}],
    "api_base": URL,
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 12,
    "num_retries": 0,
}


def main() -> None:
    """Chat, the same as a stream, and a refusal."""
    chat = litellm.completion(**CALL)
    chunks = list(litellm.completion(**CALL, stream=True, stream_options={"include_usage": True}))
    try:
        litellm.completion(**CALL | {"model": "openai/no-such-model"})
        refusal = None
    except litellm.NotFoundError as error:
        refusal = error.status_code
    result = {
        "chat": chat.choices[0].message.content,
        "usage": chat.usage.completion_tokens,
        "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
        "refusal": refusal,
    }
    sys.stdout.write(json.dumps(result))


main()
