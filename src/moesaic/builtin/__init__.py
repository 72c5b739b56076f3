"""Models that come with Moesaic: built on this machine from what is installed, then kept in a cache folder."""

from pathlib import Path
from types import MappingProxyType

from moesaic.builtin.cache import Progress, build_once
from moesaic.builtin.smol import DENSE, NOISY, SMOL
from moesaic.builtin.tiny import TINY
from moesaic.errors import ModelLoadError

__all__ = ["BUILTIN_NAMES", "Progress", "dense_reference", "materialize"]

_RECIPES = MappingProxyType({recipe.name: recipe for recipe in (SMOL, NOISY, TINY)})

BUILTIN_NAMES: tuple[str, ...] = tuple(_RECIPES)


def materialize(name: str, *, progress: Progress | None = None, cache_dir: Path | None = None) -> Path:
    """Return the directory of a built-in model, building it first if the cache does not have it.

    The directory has the layout of a model hub: config, generation config, tokenizer and safetensors in float32.
    ``progress`` is called with the stage and the share done, 0 to 1. ``cache_dir`` is the environment variable
    ``MOESAIC_CACHE`` by default, else the user's cache folder. Blocks while another process builds the same model.
    Raises: ``ModelLoadError`` for an unknown name, a missing package or a full disk.
    """
    if name not in _RECIPES:
        raise ModelLoadError(f"no built-in model is called {name!r}; there are: {', '.join(BUILTIN_NAMES)}")
    return build_once(_RECIPES[name], progress, cache_dir)


def dense_reference(cache_dir: Path | None = None, *, progress: Progress | None = None) -> Path:
    """Return the directory of the dense model that ``smol`` was made from, as float32: the oracle of its tests."""
    return build_once(DENSE, progress, cache_dir)
