"""What an engine tells Python's garbage collector."""

import gc


def keep_collections_short() -> None:
    """Let the garbage collector look no more at what start-up has made, modules and model: it stays to the end.

    A full collection over it takes some tens of milliseconds, which every stream would wait for.
    """
    gc.collect()
    gc.freeze()
