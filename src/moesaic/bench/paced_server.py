"""``moesaic serve`` over a paced engine, as a command for ``moesaic bench server``.

A module of its own: the engine's process imports its factory by name, which ``__main__`` has not.
"""

import sys
from functools import partial

from moesaic.bench.paced import load_paced
from moesaic.config import EngineConfig
from moesaic.server.main import serve
from moesaic.server.settings import ServerConfig


def main(model: str, step_s: str, num_streams: str, num_kv_blocks: str) -> int:
    """Serve until a signal; return the exit code."""
    config = paced_config(int(num_streams), int(num_kv_blocks))
    return serve(model, config, ServerConfig(port=0), make_core=partial(load_paced, step_s=float(step_s)))


def paced_config(num_streams: int, num_kv_blocks: int) -> EngineConfig:
    """Return settings under which all streams run at once; the same for both arms."""
    return EngineConfig(
        device="cpu", max_batch_size=num_streams, num_kv_blocks=num_kv_blocks, enable_chunked_prefill=True
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
