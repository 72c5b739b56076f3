"""From a name to the files of a model on this machine; no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.builtin import BUILTIN_NAMES, Progress, materialize
from moesaic.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def resolve_model_path(model: str, *, progress: Progress | None = None, with_weights: bool = True) -> Path:
    """Return the local directory of a built-in name, a directory or a hub id (downloads if it must).

    Without ``with_weights`` a download leaves them out.
    Raises: ``ModelLoadError`` if it is none of these, with the remedy.
    """
    if model in BUILTIN_NAMES:
        return materialize(model, progress=progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ModelLoadError(
            f"model {model!r} is no directory, no built-in ({', '.join(BUILTIN_NAMES)}) and no hub id "
            "(owner/name); check the path"
        )
    return _download(model, _HUB_FILES if with_weights else tuple(set(_HUB_FILES) - {"*.safetensors"}))


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer in ``path``, or None if the directory holds none.

    Raises: ``ModelLoadError`` if its files are broken.
    """
    if not any((path / name).exists() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception for a broken file
        raise ModelLoadError(f"the tokenizer in {path} cannot be read: {error}") from error
    return tokenizer


def _download(model: str, patterns: tuple[str, ...]) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, allow_patterns=list(patterns)))
    except Exception as error:  # the hub client raises many unrelated classes for offline, unknown and forbidden
        raise ModelLoadError(
            f"hub model {model!r} cannot be downloaded ({type(error).__name__}: {error}); "
            "check the name and the network, or pass a local directory"
        ) from error
