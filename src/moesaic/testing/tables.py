"""Every table that our objects keep, and how much is in it: what a request leaves behind shows as a number."""

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any


def table_sizes(root: object, *, without: Collection[object] = ()) -> dict[str, int]:
    """Return the length of each container that is reachable from ``root``, by its path of attributes.

    Followed are the attributes of Moesaic's own objects and the items of containers. Left out are ``without`` and
    deques with a ``maxlen``, which are bounded as they are.
    """
    return dict(_walk(root, type(root).__name__, set(map(id, without))))


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, int]]:  # Any: whatever an attribute holds
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(value, dict | list | set | deque) and not (isinstance(value, deque) and value.maxlen is not None):
        yield path, len(value)
        for i, item in enumerate(value.values() if isinstance(value, dict) else value):
            yield from _walk(item, f"{path}[{i}]", seen)
    elif type(value).__module__.startswith("moesaic."):
        for name in _attributes(value):
            yield from _walk(getattr(value, name, None), f"{path}.{name}", seen)


def _attributes(value: object) -> Collection[str]:
    """Return the names of what an object stores, with or without slots."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return dict.fromkeys([*getattr(value, "__dict__", ()), *slots])
