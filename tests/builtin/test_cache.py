from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moesaic.builtin.cache import Progress, Recipe, build_once, cache_root
from moesaic.errors import ModelLoadError


def _write_file(directory: Path, progress: Progress) -> None:
    progress("write", 0.5)
    (directory / "file").write_text("x")


def _recipe(build: Callable[[Path, Progress], None] = _write_file, version: int = 1, size_bytes: int = 1) -> Recipe:
    return Recipe(name="thing", version=version, size_bytes=size_bytes, build=build)


def test_a_second_call_builds_nothing(tmp_path: Path) -> None:
    stages: list[tuple[str, float]] = []
    first = build_once(_recipe(), lambda *stage: stages.append(stage), tmp_path)
    assert stages == [("write", 0.5), ("done", 1.0)]
    assert build_once(_recipe(), lambda *stage: stages.append(stage), tmp_path) == first
    assert len(stages) == 2


def test_a_changed_recipe_is_built_beside_the_old_one(tmp_path: Path) -> None:
    assert build_once(_recipe(version=1), None, tmp_path) != build_once(_recipe(version=2), None, tmp_path)


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(directory: Path, progress: Progress) -> None:
        _write_file(directory, progress)
        raise ModelLoadError("broken")

    with pytest.raises(ModelLoadError, match="broken"):
        build_once(_recipe(fail), None, tmp_path)
    assert [p.name for p in (tmp_path / "builtin").iterdir() if p.is_dir()] == []
    assert (build_once(_recipe(), None, tmp_path) / "file").exists()


def test_what_a_killed_builder_left_is_removed(tmp_path: Path) -> None:
    left_over = tmp_path / "builtin" / ".thing-building-abc"
    left_over.mkdir(parents=True)
    build_once(_recipe(), None, tmp_path)
    assert not left_over.exists()


def test_concurrent_callers_build_once(tmp_path: Path) -> None:
    builds: list[Path] = []

    def count(directory: Path, progress: Progress) -> None:
        builds.append(directory)
        _write_file(directory, progress)

    with ThreadPoolExecutor(4) as pool:
        results = set(pool.map(lambda _: build_once(_recipe(count), None, tmp_path), range(4)))
    assert len(builds) == len(results) == 1


def test_too_little_space_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"needs {10**18} bytes but .* MOESAIC_CACHE"):
        build_once(_recipe(size_bytes=10**18), None, tmp_path)


def test_a_folder_that_cannot_be_made_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match="set MOESAIC_CACHE to a folder"):
        build_once(_recipe(), None, tmp_path / "file")


def test_the_folder_is_the_named_one_or_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOESAIC_CACHE", "/named")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root(tmp_path) == tmp_path
    assert cache_root() == Path("/named")
    monkeypatch.delenv("MOESAIC_CACHE")
    assert cache_root() == Path("/xdg/moesaic")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_root() == Path.home() / ".cache" / "moesaic"
