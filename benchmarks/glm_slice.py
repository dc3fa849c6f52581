"""A slice of GLM-5.3 with one GPU's share of a node under DP: eight equal GPUs, of which one is enough to measure.

Under DP a GPU carries its own requests, pool and host memory, and 32 of the 256 experts of each layer. With B tokens on
each of eight GPUs its experts take 8 B x 8 x 32 / 256 = 8 B of the token-expert pairs: what B tokens choose from 32
experts. So a model with 32 experts on one GPU does a GPU's work, all but the exchange of tokens between GPUs.

Layers 2 to 9 are two IndexShare groups of four; the first layer has a dense MLP, the others experts. In that slice
index keys and rows stand in nearly the proportion of the whole model (2 keys for 8 rows, 21 for 78), so memory cut to
8/78 admits as many requests as all of it. The vocabulary is cut likewise. Times of a step then scale by 78/8.
"""

from dataclasses import replace

from models import ModelConfig
from ula_jax.known_models import KNOWN
from ula_jax.report import UserError
from ula_jax.spec import Budget

GPUS = 8
GLM = KNOWN["glm-5.3"] | dict(num_nextn_predict_layers=0)
"""GLM-5.2 and 5.3, without the multi-token-prediction layer."""
LAYERS = GLM["num_hidden_layers"]

TINY_WIDTHS = dict(
    vocab_size=6144, hidden_size=64, num_attention_heads=8, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=16, intermediate_size=96, moe_intermediate_size=32, n_routed_experts=64,
    num_experts_per_tok=2, index_topk=16, index_head_dim=16, index_n_heads=4,
)  # fmt: skip
"""GLM for a CPU."""


def layer_slice(first: int, layers: int, tiny: bool = False, gpus: int = 1) -> ModelConfig:
    """Layers first .. first + layers - 1, with the experts of so many of eight GPUs. UserError unless the first
    of them has an indexer."""
    whole = ModelConfig.from_hub(GLM | TINY_WIDTHS if tiny else GLM)
    kept = slice(first, first + layers)
    if not (first >= 0 and layers >= 1 and kept.stop <= LAYERS and whole.full_layers[first]):
        owners = [layer for layer, full in enumerate(whole.full_layers) if full]
        raise UserError(
            f"layers: expected some of {LAYERS} that begin with one of {owners}, found {first} to {kept.stop - 1}; "
            "change --first-layer or --layers"
        )
    return replace(
        whole,
        num_layers=layers,
        sparse_layers=whole.sparse_layers[kept],
        full_layers=whole.full_layers[kept],
        num_experts=whole.num_experts * gpus // GPUS,
        vocab_size=max(1, round(whole.vocab_size * layers / LAYERS / 128)) * 128,
    )


def share(device_bytes: float, host_bytes: float, layers: int) -> Budget:
    """The part of a GPU's KV memory that so many layers get."""
    return Budget(int(device_bytes * layers / LAYERS), int(host_bytes * layers / LAYERS))
