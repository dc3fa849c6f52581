"""What devices send each other under TP: scores against candidates, and rows against queries, for GLM-5.3.

Selecting: `scores` gathers a score for each position of the context, `candidates` the best of each device with their
positions. Attending: `ula` fetches rows to the queries, `owner_computes` sends queries to the rows. The bytes are those
of the collectives in steps compiled for eight H200s (`ula_jax.links`, checked by tests/aot), received by one device.

`missing` is arithmetic: what fetching sends if a device keeps rows that it fetched before, as in a selected buffer
(`ula:buffer=N`), and gets the others alone, each once, by an all-gather. Whole rounds are sent, so a step sends up to
an eighth of a selection more. `ula replay` says which share of rows a buffer of a given size holds.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich.table import Table

from benchmarks.glm_slice import GLM
from models import ModelConfig
from ula_jax.links import Collective, collectives
from ula_jax.parallel import Parallel
from ula_jax.placements import make_placement
from ula_jax.report import or_exit, print_table, report
from ula_jax.spec import KVSpec

K = 1024


@dataclass(frozen=True)
class Config:
    devices: int = 8
    contexts: tuple[int, ...] = (8 * K, 128 * K, 1024 * K)
    """For the first table."""
    batches: tuple[int, ...] = (1, 8, 64, 256)
    """Requests in a decode step, for the second table."""
    hit_rates: tuple[float, ...] = (0.5, 0.8, 0.9, 0.99)
    """Shares of the selected rows that a device has kept, for `missing`."""
    link: float = 450e9
    """Bytes a second that a device receives: NVLink of an H200, as published. Only the times depend on it."""
    out: Path = Path("results")


def run(config: Config) -> dict[str, Any]:
    model = ModelConfig.from_hub(GLM)
    spec = KVSpec.of(model, rows="fp8", page_size=64, max_context=max(config.contexts))
    parallel = Parallel(tp=config.devices)
    ula, owner = (make_placement(name, parallel) for name in ("ula", "owner_computes"))

    def received(purpose: str, found: list[Collective]) -> float:
        return sum(one.received(config.devices) for one in found if one.purpose == purpose)

    selecting = []
    for context in config.contexts:
        at = replace(spec, max_context=context)
        sizes = {g: received("select", collectives(ula, at, 1, model.num_heads, g)) for g in ("scores", "candidates")}
        selecting.append({"context": context, **sizes})
    attending = []
    for batch in config.batches:
        fetched, computed = (
            received("attend", collectives(placement, spec, batch, model.num_heads)) for placement in (ula, owner)
        )
        missing = {str(rate): (1 - rate) * fetched / 2 for rate in (0.0, *config.hit_rates)}
        attending.append({"batch": batch, "ula": fetched, "owner_computes": computed, "missing": missing})
    one = attending[0]
    crossover = {
        "context_of_candidates": config.devices * 2 * spec.topk,
        "kept": 1 - one["owner_computes"] / one["missing"]["0.0"],
    }
    return {"selecting": selecting, "attending": attending, "crossover": crossover, "link": config.link}


def show(result: dict[str, Any]) -> None:
    table = Table("context", "scores", "candidates", title="selecting: kB a device receives for a token of all groups",
                  title_justify="left")  # fmt: skip
    for row in result["selecting"]:
        table.add_row(f"{row['context'] // K}K", *(f"{row[g] / 1e3:,.0f}" for g in ("scores", "candidates")))
    print_table(table)
    rates = list(result["attending"][0]["missing"])
    table = Table("requests", "ula", "owner_computes", *(f"missing, {float(r):.0%} kept" for r in rates), title=(
        f"attending: MB a device receives in a step (ms at {result['link'] / 1e9:.0f} GB/s); missing is arithmetic"
    ), title_justify="left")  # fmt: skip
    for row in result["attending"]:
        sizes = (row["ula"], row["owner_computes"], *row["missing"].values())
        table.add_row(str(row["batch"]), *(f"{s / 1e6:,.0f} ({1e3 * s / result['link']:.2f})" for s in sizes))
    print_table(table)
    cross = result["crossover"]
    print(
        f"candidates are fewer bytes from contexts of {cross['context_of_candidates'] // K}K on; owner_computes sends "
        f"less than fetching unless a device has kept {cross['kept']:.1%} of what it needs"
    )


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    result = or_exit(run, config)
    show(result)
    report(result, config.out, "link_bytes")


if __name__ == "__main__":
    main()
