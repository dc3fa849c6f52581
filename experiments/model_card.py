"""The README.md of a model directory that `experiments.train_tiny` writes."""

import textwrap
from pathlib import Path
from typing import Any

from experiments.python_corpus import HELD_OUT
from experiments.trainer import Stage
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

Measured on {devices} in {products}: {held_out_windows} windows that do not overlap, from {held_out}. A draft counts as
accepted where the MTP layer's greedy byte is the model's own. To measure again (`--held-out 8` takes the first windows
alone, which are the beginnings of modules and harder):

    python -m experiments.train_tiny --evaluate

## Training

    {command}

{date}, JAX {jax}, Python {python}, {devices}. {note}

DeepSeek's DSA recipe ({train_bytes:,} bytes in {documents} files), AdamW, in stages:

| stage | steps | context | bytes a step | attention | trains |
|---|---|---|---|---|---|
{stages}

Routers are balanced by their bias alone. The masters and Adam's second moment are fp32, products {products}.

## Data and licence

The sources of Python's standard library as installed with the interpreter, tests at most half of them, without
generated tables. They are under the PSF License Agreement, and so are these weights, as far as weights are a work
derived from their data.
"""


def write_card(out: Path, config: ModelConfig, result: dict[str, Any], plan: tuple[Stage, ...], note: str = "") -> None:
    """README.md beside the weights.

    Args:
      result: what `experiments.train_tiny` prints.
      note: whatever else a reader should know of this run.
    """
    rows = []
    for stage in plan:
        kind = "top-k" if stage.attention.sparse else "dense"
        rows.append(
            f"| {stage.name} | {stage.steps:,} | {stage.context} | {stage.batch * stage.context:,} | {kind} | "
            f"{' and '.join(stage.trained)} |"
        )
    ends = [row for row in result["log"] if row["stage_end"] and row["stage"] == "long"]
    text = CARD.format(
        **result | {"command": "python -m experiments." + result["command"].replace(".py", "", 1)},
        layers=config.num_layers,
        indexers=sum(config.full_layers),
        topk=config.index_topk,
        experts=config.num_experts,
        active=config.num_experts_per_token,
        before=f"{ends[-1]['held_out']['language']:.3f}" if ends else "not measured",
        products="bf16" if result["platform"] == "GPU" else "fp32",
        held_out=", ".join(f"{name}.py" for name in HELD_OUT),
        stages="\n".join(rows),
        note=note,
    )
    (out / "README.md").write_text("\n\n".join(map(_wrapped, text.split("\n\n"))))


def _wrapped(block: str) -> str:
    """Paragraphs of at most 120 columns; tables, headings and code stay as they are."""
    if block.startswith(("---", "#", "|", "    ")):
        return block
    wrapped = textwrap.fill(block, 120, break_long_words=False, break_on_hyphens=False)
    return wrapped + "\n" * block.endswith("\n")
