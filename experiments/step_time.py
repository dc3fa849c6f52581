"""Time of a decode step against batch and context, by a model of its parts (`ula_jax/roofline.py`): no measurement.

Rows end where a placement holds no more requests (`ula capacity`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.table import Table

from ula_jax import capacity
from ula_jax.parallel import Parallel
from ula_jax.placements import make_placement
from ula_jax.placements.base import fitting
from ula_jax.report import UserError, environment, or_exit, print_table, report
from ula_jax.roofline import CARDS, step_time
from ula_jax.spec import Budget

HIT_RATES = {"gpu_only": 1.0, "hisparse": 0.910, "resident_hot": 0.964, "ula": 0.956, "owner_computes": 0.956}
"""Of device pools, at the peaks that one H200 reached (`docs/results/h200.md`)."""


@dataclass(frozen=True)
class Config:
    hardware: tuple[str, ...] = ("8xH200", "8xB300")
    model: str = "glm-5.3"
    mode: str = "tp"
    contexts: tuple[int, ...] = (32_768, 98_304, 131_072)
    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    """Requests of each rank."""
    placements: tuple[str, ...] = ("gpu_only", "hisparse", "ula", "ula:buffer=6144", "owner_computes")
    gather: str = "candidates"
    """What devices of a stripe send each other to select: `scores` or `candidates`."""
    out: Path = Path("results")


def run(config: Config) -> dict[str, Any]:
    """Seconds by part for each machine, placement, context and batch."""
    if config.gather not in ("scores", "candidates"):
        raise UserError(f"gather: expected 'scores' or 'candidates', found {config.gather!r}; choose one of them")
    model, rows = capacity.architecture(config.model), []
    if not model.index_dim:
        raise UserError(
            f"model: expected one with an indexer, found {config.model!r}: attention to all rows was not measured; "
            "choose glm-5.3 or deepseek-v3.2"
        )
    for hardware in config.hardware:
        settings = capacity.Config(hardware=hardware, model=config.model)
        node, card = capacity.machine(settings), CARDS.get(hardware.partition("x")[2])
        if card is None:
            raise UserError(f"hardware: expected one of {sorted(CARDS)}, found {hardware!r}; choose one of them")
        parallel = Parallel.of(config.mode, node.devices)
        spec = model.spec(settings, max(config.contexts))
        left = node.device_bytes * settings.usable - model.weights(parallel, settings.draft)
        if left <= 0:
            raise UserError(f"hardware: expected room beside the weights, found none on {hardware}; take more devices")
        for name in config.placements:
            if name.partition(":")[0] not in HIT_RATES:
                raise UserError(f"placements: expected those of {sorted(HIT_RATES)}, found {name!r}; choose among them")
            placement = make_placement(name, parallel)
            held = fitting(placement, spec, Budget(int(left), int(node.host_bytes)))
            for context in config.contexts:
                most = held.requests(context) // held.ranks
                for batch in sorted({n for n in (*config.batches, most) if 0 < n <= most}):
                    parts = step_time(
                        card, model, placement, spec, held, batch, context,
                        hit_rate=HIT_RATES[name.partition(":")[0]], gather=config.gather, draft=settings.draft,
                    )  # fmt: skip
                    seconds = sum(parts.values())
                    rows.append({
                        "hardware": hardware, "placement": name, "context": context, "batch": batch, "most": most,
                        "seconds": seconds, "tokens_per_second": held.ranks * batch / seconds, "parts": parts,
                    })  # fmt: skip
    return {"model": "roofline, not measured", "rows": rows, "gather": config.gather, **environment()}


def show(result: dict[str, Any]) -> None:
    parts = ("weights", "attend", "index scores", "top-k", "resolve", "host", "links", "floors")
    table = Table(title="decode step by a model (not measured), ms", title_justify="left")
    for header in ("machine", "placement", "context", "requests", "step", "tokens/s", *parts):
        table.add_column(header, justify="left" if header in ("machine", "placement") else "right")
    for row in result["rows"]:
        full = "" if row["batch"] < row["most"] else " (full)"
        table.add_row(
            row["hardware"], row["placement"], f"{row['context'] // 1024}K", f"{row['batch']}{full}",
            f"{row['seconds'] * 1e3:.1f}", f"{row['tokens_per_second']:,.0f}",
            *(f"{row['parts'].get(part, 0) * 1e3:.2f}" for part in parts),
        )  # fmt: skip
    print_table(table)


def plot(result: dict[str, Any], path: Path) -> None:
    """Tokens a second against requests, a panel for each machine and context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = result["rows"]
    machines = list(dict.fromkeys(row["hardware"] for row in rows))
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    shape = (len(machines), len(contexts))
    figure, panels = plt.subplots(*shape, figsize=(4.5 * shape[1], 3.5 * shape[0]), layout="constrained", squeeze=False)
    for machine, line in zip(machines, panels, strict=True):
        for context, axes in zip(contexts, line, strict=True):
            mine = [row for row in rows if (row["hardware"], row["context"]) == (machine, context)]
            for name in dict.fromkeys(row["placement"] for row in mine):
                points = [(row["batch"], row["tokens_per_second"]) for row in mine if row["placement"] == name]
                axes.plot(*zip(*points, strict=True), marker="o", label=name)
            axes.set(title=f"{machine}, {context // 1024}K", xlabel="requests", ylabel="tokens/s", xscale="log")
            axes.grid(alpha=0.3, which="both")
    panels[0][0].legend(fontsize="small")
    figure.suptitle("throughput by a model of the step, not measured")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    result = or_exit(run, config)
    plot(result, config.out / "step_time.png")
    show(result)
    report(result, config.out, "step_time")


if __name__ == "__main__":
    main()
