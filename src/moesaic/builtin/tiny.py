"""``tiny``: a random Qwen3-MoE of under 2 MB with a byte tokenizer, for tests."""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from moesaic.builtin.cache import Progress, Recipe
from moesaic.builtin.tokens import byte_alphabet, byte_level_bpe, save_tokenizer, write_json

HIDDEN = 64
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
EXPERTS = 8
EXPERT_WIDTH = 32
CONTEXT_TOKENS = 8192
SPECIAL = ("<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS, PAD, _, EOS = range(256, 256 + len(SPECIAL))
VOCAB = 256 + len(SPECIAL)
SEED = 20261201

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * EXPERT_WIDTH,
    "moe_intermediate_size": EXPERT_WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


def _build(directory: Path, progress: Progress) -> None:
    progress("tokenizer", 0.0)
    vocab = {token: i for i, token in enumerate((*byte_alphabet(), *SPECIAL))}
    save_tokenizer(
        byte_level_bpe(vocab, [], SPECIAL, splits_words=False),
        directory,
        chat_template=CHAT_TEMPLATE,
        max_length_tokens=CONTEXT_TOKENS,
        bos=SPECIAL[0],
        eos=SPECIAL[3],
        pad=SPECIAL[1],
    )
    progress("weights", 0.5)
    write_json(directory / "config.json", CONFIG)
    write_json(directory / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD})
    save_file(_weights(), directory / "model.safetensors", metadata={"format": "pt"})


def _weights() -> dict[str, NDArray[np.float32]]:
    """Return every tensor under its hub name, one tensor per expert.

    Numpy's generator rather than torch's, so that the weights are the same for every torch and every device.
    """
    rng = np.random.default_rng(SEED)

    def random(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        # Variance 1/columns keeps the size of what passes through, so that each layer changes the outcome.
        return (rng.standard_normal((rows, columns)) * (gain / math.sqrt(columns))).astype(np.float32)

    def ones(size: int) -> NDArray[np.float32]:
        return np.ones(size, dtype=np.float32)

    weights = {"model.embed_tokens.weight": random(VOCAB, HIDDEN, gain=8.0)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}input_layernorm.weight": ones(HIDDEN),
            f"{at}post_attention_layernorm.weight": ones(HIDDEN),
            f"{at}self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
            f"{at}self_attn.q_norm.weight": ones(HEAD_DIM),
            f"{at}self_attn.k_norm.weight": ones(HEAD_DIM),
            f"{at}mlp.gate.weight": random(EXPERTS, HIDDEN),
        }
        for expert in range(EXPERTS):
            of = f"{at}mlp.experts.{expert}."
            weights[f"{of}gate_proj.weight"] = random(EXPERT_WIDTH, HIDDEN)
            weights[f"{of}up_proj.weight"] = random(EXPERT_WIDTH, HIDDEN)
            weights[f"{of}down_proj.weight"] = random(HIDDEN, EXPERT_WIDTH, gain=2.0)
    return weights | {"model.norm.weight": ones(HIDDEN), "lm_head.weight": random(VOCAB, HIDDEN, gain=2.0)}


TINY = Recipe(name="tiny", version=1, size_bytes=2_000_000, build=_build)
