"""What transformers computes with the model in models/tiny: tests/golden/tiny/oracle.npz.

    python -m pip install torch==2.14.1 transformers==5.24.0
    python tests/golden/make_tiny_golden.py

Float32 on a CPU, eager attention, from the checkpoint as it is. Two passages of modules that the model was not trained
on, in which no index scores tie at the boundary of a selection (torch breaks ties as it likes); their bytes are kept,
since modules differ from one Python to the next.

| key | meaning |
|---|---|
| input_ids [2, 512] uint8 | a passage of argparse.py, one of statistics.py |
| logits [2, 64, 256] | of the last positions |
| greedy [2, 512] uint8 | argmax of the logits of every position |
| nats [2, 511] | -log p of each next byte |
| selected/<layer> [2, 512, 64] uint8 | what each indexer selects, as bits (numpy.packbits of masks [512, 512]) |
"""

import sysconfig
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "models" / "tiny"
PASSAGES = (("argparse", 0), ("statistics", 20000))
LENGTH, KEPT = 512, 64


def pack(picks: np.ndarray) -> np.ndarray:
    """Selected positions [B, S, k] as bits; short rows are filled up with positions that are still to come."""
    mask = np.zeros((*picks.shape[:2], LENGTH), bool)
    np.put_along_axis(mask, picks, True, -1)
    return np.packbits(mask & np.tri(LENGTH, dtype=bool), -1)


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(2)
    model, report = AutoModelForCausalLM.from_pretrained(
        MODEL, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    model.eval()
    layers = model.config.num_hidden_layers
    # transformers has no MTP layer in this family and leaves it out; nothing else may be left out or made up.
    strange = [name for name in report["unexpected_keys"] if not name.startswith(f"model.layers.{layers}.")]
    if report["missing_keys"] or report["mismatched_keys"] or strange:
        raise SystemExit(f"error: {MODEL}: expected every tensor and no other, found {report}")
    selected: dict[str, np.ndarray] = {}
    for number, layer in enumerate(model.model.layers):
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.register_forward_hook(
                lambda _module, _inputs, picks, name=f"selected/{number}": selected.update({name: pack(picks.numpy())})
            )
    library = Path(sysconfig.get_path("stdlib"))
    texts = [(library / f"{name}.py").read_bytes()[start : start + LENGTH] for name, start in PASSAGES]
    ids = torch.tensor([list(text) for text in texts])
    logits = model(input_ids=ids, use_cache=False).logits
    nats = -torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    out = HERE / "tiny" / "oracle.npz"
    out.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        out,
        input_ids=ids.numpy().astype(np.uint8),
        logits=logits[:, -KEPT:].numpy(),
        greedy=logits.argmax(-1).numpy().astype(np.uint8),
        nats=nats.numpy(),
        **selected,
    )
    bits = (nats.mean(1) / np.log(2)).tolist()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: {sorted(selected)}")
    print(f"{out}: {out.stat().st_size:,} bytes; {bits[0]:.3f} and {bits[1]:.3f} bits/byte")


if __name__ == "__main__":
    main()
