"""The README.md of a model directory that `experiments.train_tiny` writes."""

from pathlib import Path
from typing import Any

from experiments.python_corpus import HELD_OUT
from models import ModelConfig

CARD = """\
---
license: psf-2.0
language: code
---
# tiny: a byte-level GLM with sparse attention

{parameters:,} parameters in bf16 (routers fp32): `glm_moe_dsa` with {layers} layers of which {indexers} have an indexer
(IndexShare), top-{topk} selection, {experts} experts (top-{active}) and one multi-token-prediction layer. It is small
enough to ship and large enough that its selections are a trained model's. It knows Python's library and nothing else.

| held-out modules, context {context} | bits/byte | drafts accepted |
|---|---|---|
| sparse attention (as served) | {bits_per_byte_sparse:.3f} | {accepted_drafts_sparse:.1%} |
| dense attention, same weights | {bits_per_byte_dense:.3f} | {accepted_drafts_dense:.1%} |
| dense model before it was made sparse | {before} | |

{held_out_windows} windows that do not overlap, from {held_out}. A draft counts as accepted where the MTP layer's greedy
byte is the model's own.

## Training

`{command}`, {date}, JAX {jax}, Python {python}, {devices}. DeepSeek's DSA recipe ({train_bytes:,} bytes in {documents}
files), AdamW, in stages:

| stage | steps | context | bytes a step | attention | trains |
|---|---|---|---|---|---|
{stages}

Routers are balanced by their bias alone. The masters and Adam's second moment are fp32, products bf16.

## Data and licence

The sources of Python's standard library as installed with the interpreter, tests at most half of them, without
generated tables. They are under the PSF License Agreement, and so are these weights, as far as weights are a work
derived from their data.
"""


def write_card(out: Path, config: ModelConfig, result: dict[str, Any], plan: tuple[Any, ...], about: Any) -> None:
    """README.md beside the weights."""
    rows = []
    for stage in plan:
        trains = [name for name, rate in (("model", stage.model_rate), ("indexers", stage.indexer_rate)) if rate]
        kind = "top-k" if stage.attention.sparse else "dense"
        rows.append(
            f"| {stage.name} | {stage.steps:,} | {stage.context} | {stage.batch * stage.context:,} | {kind} | "
            f"{' and '.join(trains)} |"
        )
    ends = [row for row in result["log"] if row["stage_end"] and row["stage"] == "long"]
    text = CARD.format(
        **result,
        layers=config.num_layers,
        indexers=sum(config.full_layers),
        topk=config.index_topk,
        experts=config.num_experts,
        active=config.num_experts_per_token,
        before=f"{ends[-1]['held_out']['language']:.3f}" if ends else "not measured",
        held_out=", ".join(f"{name}.py" for name in HELD_OUT),
        stages="\n".join(rows),
    )
    (out / "README.md").write_text(text)
