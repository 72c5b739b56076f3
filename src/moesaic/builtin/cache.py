"""Where built models are kept: each is built once, whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from moesaic.errors import ModelLoadError

Progress = Callable[[str, float], None]
"""Called with what is being done and the share done, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to build one model into an empty directory."""

    name: str
    version: int
    """Raised when the result changes, so that caches rebuild."""
    size_bytes: int
    """Upper bound of what is written; checked against the free space before the build."""
    build: Callable[[Path, Progress], None]


def cache_root(cache_dir: Path | None = None) -> Path:
    """Return the folder for built models: ``cache_dir``, ``MOESAIC_CACHE`` or the user's cache folder.

    Source: XDG Base Directory Specification (``XDG_CACHE_HOME``, default ``~/.cache``; relative values are ignored).
    """
    if cache_dir is not None:
        return cache_dir
    if named := os.environ.get("MOESAIC_CACHE"):
        return Path(named).expanduser()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "moesaic"


def build_once(recipe: Recipe, progress: Progress | None, cache_dir: Path | None) -> Path:
    """Return the directory of ``recipe``, building it under a lock if it is not there.

    A directory under its final name is complete: the build happens beside it and is renamed at the end.
    Raises: ``ModelLoadError`` if the folder cannot be written or has too little space, or if the build does.
    """
    root = cache_root(cache_dir).resolve() / "builtin"
    target = root / f"{recipe.name}-v{recipe.version}"
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{recipe.name}.lock"):
            if not target.is_dir():  # another process may have built it while this one waited
                _build(recipe, target, progress or _silent)
    except OSError as error:
        raise ModelLoadError(
            f"the built-in model {recipe.name!r} cannot be written to {root} ({error}); "
            "set MOESAIC_CACHE to a folder that can hold it"
        ) from error
    return target


def _build(recipe: Recipe, target: Path, progress: Progress) -> None:
    prefix = f".{recipe.name}-building-"
    for left_over in target.parent.glob(f"{prefix}*"):  # of a killed builder: we hold the lock, so no one uses it
        shutil.rmtree(left_over)
    _require_space(recipe, target.parent)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        recipe.build(work, progress)
        work.chmod(0o755)  # mkdtemp makes it private; a shared cache is read by others
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress("done", 1.0)


def _require_space(recipe: Recipe, root: Path) -> None:
    free = shutil.disk_usage(root).free
    if free < recipe.size_bytes:
        raise ModelLoadError(
            f"the built-in model {recipe.name!r} needs {recipe.size_bytes} bytes but {root} has {free} free; "
            "free some space or set MOESAIC_CACHE to a folder on a larger disk"
        )


def _silent(stage: str, share: float) -> None:
    """The progress of who asked for none."""
