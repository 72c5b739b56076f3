"""Layer shapes to bytes to blocks: the only KV budget arithmetic in the code base."""

from dataclasses import dataclass

from moesaic.errors import ConfigError, RequestTooLargeError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKVShape:
    """What one layer stores per token: ``num_kv_heads`` keys of ``key_dim`` and values of ``value_dim``."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """The shapes of all layers, the tokens per block and the bytes per element."""

    layers: tuple[LayerKVShape, ...]
    block_size: int
    element_bytes: int

    @property
    def bytes_per_token(self) -> int:
        return self.element_bytes * sum(layer.elements_per_token for layer in self.layers)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def num_blocks_for_bytes(self, num_bytes: int) -> int:
        """Return how many blocks fit into ``num_bytes``.

        Raises: ``ConfigError`` if not even one does.
        """
        num_blocks = num_bytes // self.bytes_per_block
        if num_blocks < 1:
            raise ConfigError(
                f"{num_bytes} bytes of KV memory hold no block of {self.bytes_per_block} bytes "
                f"({self.block_size} tokens); free memory or lower --block-size"
            )
        return num_blocks


def blocks_for_tokens(num_tokens: int, block_size: int) -> int:
    """Return how many blocks ``num_tokens`` positions take."""
    return -(-num_tokens // block_size)


def kv_tokens_needed(num_prompt_tokens: int, max_tokens: int) -> int:
    """Return the positions a request writes at most: the last sampled token is never written."""
    return num_prompt_tokens + max(0, max_tokens - 1)


def blocks_needed(num_prompt_tokens: int, max_tokens: int, block_size: int) -> int:
    """Return the blocks a request holds at its largest."""
    return blocks_for_tokens(kv_tokens_needed(num_prompt_tokens, max_tokens), block_size)


def resolve_max_tokens(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """Return the output tokens a request may make; None means what the context leaves.

    Raises: ``RequestTooLargeError`` if prompt and output do not fit the context.
    """
    room = max_model_len - num_prompt_tokens
    if room < (1 if max_tokens is None else max_tokens):
        asked = "at least one output token" if max_tokens is None else f"max_tokens {max_tokens}"
        raise RequestTooLargeError(
            f"prompt has {num_prompt_tokens} tokens and {asked}, but the context holds {max_model_len} "
            "(max_model_len); shorten the prompt, lower max_tokens or raise --max-model-len",
            param="max_tokens" if room > 0 else "prompt",
        )
    return room if max_tokens is None else max_tokens


def check_servable(num_prompt_tokens: int, max_tokens: int, block_size: int, num_blocks: int) -> None:
    """Return if a pool of ``num_blocks`` can serve the request alone.

    Raises: ``RequestTooLargeError`` with both numbers if it never can.
    """
    needed = blocks_needed(num_prompt_tokens, max_tokens, block_size)
    if needed > num_blocks:
        raise RequestTooLargeError(
            f"prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}: that takes {needed} KV blocks "
            f"of {block_size} tokens, but the pool has {num_blocks} ({num_blocks * block_size} tokens); "
            "shorten the prompt, lower max_tokens or raise --num-kv-blocks",
            param="prompt",
        )


def kv_text(num_blocks: int, block_size: int, num_bytes: int) -> str:
    """Return the one line that says how large the KV cache is."""
    return f"{num_blocks} blocks of {block_size} tokens = {num_blocks * block_size} tokens, {size_text(num_bytes)}"


def size_text(num_bytes: int) -> str:
    """Return a size in MiB, as people read it."""
    return f"{num_bytes / 2**20:.0f} MiB"
