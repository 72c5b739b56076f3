"""Which model families load, what each needs beside the common wiring, and why the others are refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from moesaic.errors import UnsupportedModelError

Experts = Literal["backend", "own", "none"]
"""Routed experts go through our backend, stay in the family's own code, or do not exist (a dense model)."""

KVRule = Literal["heads", "mla", "repeated", "wide_window"]
"""How keys and values of a layer are shaped (``models/info.py`` has the arithmetic):

``heads``: the configured KV heads; ``mla``: latent attention, cached as expanded heads (K and V dims differ);
``repeated``: KV heads repeated per routed query; ``wide_window``: twice the KV heads in window layers.
"""

Rotary = Literal["shared", "layer_type", "layer_theta", "layer_type_or_scaling"]
"""Position embeddings: one for all layers, one per layer type, one per base theta, or per type with scaled queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What one proven family needs beside the common wiring.

    Names of multipliers are attributes of the family's configuration.
    """

    model_type: str
    experts: Experts = "backend"
    kv: KVRule = "heads"
    rotary: Rotary = "shared"
    has_window: bool = False
    """Some layers may have a sliding window."""
    is_window_in_mask: bool = False
    """The family puts its window into the mask only and does not pass it to the attention function."""
    has_sinks: bool = False
    has_softcap: bool = False
    """Attention scores may be capped by tanh."""
    embedding_multiplier: str | None = None
    scales_embedding_by_width: bool = False
    """Multiplies embeddings by sqrt(width) if the configuration says ``mup_enabled``."""
    logits_multiplier: str | None = None
    logits_divisor: str | None = None
    logits_softcap: str | None = None

    @property
    def attention_features(self) -> tuple[str, ...]:
        """What the attention backend must do beside causal attention, as listed in ``docs/models.md``."""
        flags = {
            "window": self.has_window,
            "sinks": self.has_sinks,
            "softcap": self.has_softcap,
            "MLA": self.kv == "mla",
        }
        return tuple(name for name, is_set in flags.items() if is_set)


def _table(*families: Family) -> Mapping[str, Family]:
    return MappingProxyType({family.model_type: family for family in families})


PROVEN: Mapping[str, Family] = _table(
    # mixture-of-experts
    Family(model_type="afmoe", has_window=True, scales_embedding_by_width=True),
    Family(model_type="axk1", kv="mla"),
    Family(
        model_type="beam", has_window=True, rotary="layer_type_or_scaling", logits_softcap="final_logit_softcapping"
    ),
    Family(model_type="cohere2_moe", has_window=True, logits_multiplier="logit_scale"),
    Family(model_type="deepseek_v2", kv="mla"),
    Family(model_type="deepseek_v3", kv="mla"),
    Family(model_type="dots1", has_window=True),
    Family(model_type="ernie4_5_moe"),
    Family(model_type="exaone_moe", has_window=True),
    Family(model_type="flex_olmo"),
    Family(model_type="flint", has_window=True, has_sinks=True),
    Family(model_type="glm4_moe"),
    Family(model_type="glm4_moe_lite", kv="mla"),
    Family(model_type="gpt_oss", has_window=True, has_sinks=True),
    Family(model_type="granitemoe", embedding_multiplier="embedding_multiplier", logits_divisor="logits_scaling"),
    Family(
        model_type="granitemoe_swa",
        has_window=True,
        has_sinks=True,
        rotary="layer_theta",
        embedding_multiplier="embedding_multiplier",
        logits_divisor="logits_scaling",
    ),
    Family(model_type="granitemoeshared", embedding_multiplier="embedding_multiplier", logits_divisor="logits_scaling"),
    Family(model_type="hunyuan_v1_moe"),
    Family(model_type="hy_v3"),
    Family(model_type="jetmoe", experts="own", kv="repeated"),
    Family(model_type="kolibri1", has_window=True),
    Family(model_type="laguna", has_window=True, rotary="layer_type"),
    Family(model_type="mellum", has_window=True, rotary="layer_type"),
    Family(model_type="mimo_v2_flash", has_window=True, has_sinks=True, rotary="layer_type", kv="wide_window"),
    Family(model_type="minimax_m2"),
    Family(model_type="mixtral", has_window=True),
    Family(model_type="olmoe"),
    Family(model_type="phimoe", has_window=True, is_window_in_mask=True),
    Family(model_type="qwen2_moe", has_window=True, is_window_in_mask=True),
    Family(model_type="qwen3_moe", has_window=True),
    Family(model_type="sarvam_mla", kv="mla"),
    Family(model_type="sarvam_moe"),
    Family(model_type="solar_open"),
    # dense
    Family(model_type="apertus", experts="none"),
    Family(model_type="arcee", experts="none"),
    Family(model_type="cohere", experts="none", logits_multiplier="logit_scale"),
    Family(model_type="cohere2", experts="none", has_window=True, logits_multiplier="logit_scale"),
    Family(model_type="cwm", experts="none", has_window=True),
    Family(model_type="ernie4_5", experts="none"),
    Family(model_type="exaone4", experts="none", has_window=True),
    Family(model_type="gemma", experts="none"),
    Family(
        model_type="gemma2",
        experts="none",
        has_window=True,
        has_softcap=True,
        logits_softcap="final_logit_softcapping",
    ),
    Family(
        model_type="gemma3_text",
        experts="none",
        has_window=True,
        rotary="layer_type",
        logits_softcap="final_logit_softcapping",
    ),
    Family(model_type="glm", experts="none"),
    Family(model_type="glm4", experts="none"),
    Family(
        model_type="granite",
        experts="none",
        embedding_multiplier="embedding_multiplier",
        logits_divisor="logits_scaling",
    ),
    Family(
        model_type="granite_swa",
        experts="none",
        has_window=True,
        has_sinks=True,
        rotary="layer_theta",
        embedding_multiplier="embedding_multiplier",
        logits_divisor="logits_scaling",
    ),
    Family(model_type="helium", experts="none"),
    Family(model_type="hunyuan_v1_dense", experts="none"),
    Family(
        model_type="hyperclovax",
        experts="none",
        embedding_multiplier="embedding_multiplier",
        logits_multiplier="logits_scaling",
    ),
    Family(model_type="jais2", experts="none"),
    Family(model_type="llama", experts="none"),
    Family(model_type="ministral", experts="none", has_window=True),
    Family(model_type="ministral3", experts="none", has_window=True),
    Family(model_type="mistral", experts="none", has_window=True),
    Family(model_type="olmo", experts="none"),
    Family(model_type="olmo2", experts="none"),
    Family(model_type="olmo3", experts="none", has_window=True, rotary="layer_type"),
    Family(model_type="phi3", experts="none", has_window=True),
    Family(model_type="qwen2", experts="none", has_window=True),
    Family(model_type="qwen3", experts="none", has_window=True),
    Family(model_type="seed_oss", experts="none"),
    Family(model_type="smollm3", experts="none", has_window=True),
    Family(model_type="starcoder2", experts="none", has_window=True),
    Family(
        model_type="vaultgemma",
        experts="none",
        has_window=True,
        has_softcap=True,
        logits_softcap="final_logit_softcapping",
    ),
    Family(model_type="youtu", experts="none", kv="mla"),
)
"""Families whose logits equal the unmodified model's; ``tests/models/test_families.py`` proves each one."""


_STATE = "some of its layers keep recurrent or convolution state per sequence, which has no place in paged KV"
_INDEXER = "its sparse attention chooses keys through a mask of its own, which a paged backend never sees"
_NO_KEYWORDS = "its layers forward no keywords to the attention function, so the step cannot reach it"
_SHARED_KV = "its layers share keys and values and take per-layer embeddings"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "axk2": _INDEXER,
        "bailing_hybrid": _STATE,
        "bamba": _STATE,
        "dbrx": "its layers have another structure and its experts are outside the experts hook",
        "deepseek_v32": _INDEXER,
        "deepseek_v4": "its attention keeps compressed state; logits differed by 0.98 from the unmodified model",
        "doge": "it builds a dynamic mask of its own; results were silently wrong without it",
        "falcon_h1": _STATE,
        "falcon_mamba": _STATE,
        "gemma3n_text": _SHARED_KV,
        "gemma4_text": _SHARED_KV,
        "glm_moe_dsa": _INDEXER,
        "granitemoehybrid": _STATE,
        "hy_v4": _INDEXER,
        "jamba": f"{_STATE}; results were silently wrong",
        "kimi_linear": _STATE,
        "lara_mini": _STATE,
        "lfm2": _STATE,
        "lfm2_moe": _STATE,
        "llama4_text": "it scales queries by their index in the step, not by position; logits differed by 0.23",
        "longcat_flash": "its layers hold two attention modules and its experts are outside the experts hook",
        "mamba": _STATE,
        "mamba2": _STATE,
        "minimax": f"{_STATE} (lightning attention); results were silently wrong",
        "mistral4": "transformers has no text-only causal model of it",
        "nemotron": _NO_KEYWORDS,
        "nemotron_h": _STATE,
        "olmo_hybrid": _STATE,
        "qwen3_5_moe": _STATE,
        "qwen3_5_moe_text": _STATE,
        "qwen3_5_text": _STATE,
        "qwen3_next": _STATE,
        "qwen4_exp_text": _STATE,
        "recurrent_gemma": _STATE,
        "stablelm": _NO_KEYWORDS,
        "zamba": _STATE,
        "zamba2": _STATE,
        "zaya": _STATE,
    }
)
"""Families known not to work here, with the reason; what is in neither table is refused as not proven."""


def family_of(model_type: str) -> Family:
    """Return the entry of a proven family.

    Raises: ``UnsupportedModelError`` naming the family, the reason and the families that load.
    """
    family = PROVEN.get(model_type)
    if family is None:
        reason = REFUSED.get(model_type, "it is not proven to give right results here")
        raise UnsupportedModelError(
            f"model family {model_type!r} is not supported: {reason}; supported families: {', '.join(sorted(PROVEN))}"
        )
    return family
