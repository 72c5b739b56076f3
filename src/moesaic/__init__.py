"""Moesaic: a server for mixture-of-experts language models.

``import moesaic`` loads neither torch nor transformers; a public name loads its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "StructuredOutput", "EngineConfig", "RequestOutput", "__version__"]

if TYPE_CHECKING:
    from moesaic.config import EngineConfig
    from moesaic.engine.llm import LLM
    from moesaic.request import RequestOutput, SamplingParams
    from moesaic.structured import StructuredOutput

_HOMES = {
    "LLM": "moesaic.engine.llm",
    "EngineConfig": "moesaic.config",
    "SamplingParams": "moesaic.request",
    "StructuredOutput": "moesaic.structured",
    "RequestOutput": "moesaic.request",
}


def __getattr__(name: str) -> Any:  # Any: PEP 562 serves names of different types
    if name not in _HOMES:
        raise AttributeError(f"module 'moesaic' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
