"""Requests that each placement admits, over the length of their contexts (UlaCache's figure), for one node.

As `ula capacity`, which has the assumptions, for several contexts; `--model` also takes a hub config.json.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from ula_jax import capacity
from ula_jax.report import environment, or_exit, report


@dataclass(frozen=True)
class Config:
    node: Annotated[capacity.Config, tyro.conf.OmitArgPrefixes] = field(default_factory=capacity.Config)
    contexts: tuple[str, ...] = ("32k", "64k", "96k", "128k", "256k")
    """In place of --context."""


def run(config: Config) -> dict[str, Any]:
    results = [capacity.run(replace(config.node, context=context)) for context in config.contexts]
    rows = [row for result in results for row in result["rows"]]
    return {"rows": rows, "assumptions": results[0]["assumptions"], **environment()}


def plot(result: dict[str, Any], path: Path, hardware: str) -> None:
    """A panel for each mode, a line for each placement."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = result["rows"]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure, panels = plt.subplots(1, len(modes), figsize=(6 * len(modes), 4.5), layout="constrained", squeeze=False)
    for mode, axes in zip(modes, panels[0], strict=True):
        mine = [row for row in rows if row["mode"] == mode]
        for name in dict.fromkeys(row["placement"] for row in mine):
            line = [(row["context"], row["admitted"]) for row in mine if row["placement"] == name]
            axes.plot(*zip(*line, strict=True), marker="o", label=name)
        axes.set(title=mode, xlabel="context", ylabel="requests held at once", yscale="log")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize="small")
    figure.suptitle(f"{result['assumptions']['model']} on {hardware}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    result = or_exit(run, config)
    plot(result, config.node.out / "admitted_requests.png", config.node.hardware)
    capacity.show(result)
    report(result, config.node.out, "admitted_requests")


if __name__ == "__main__":
    main()
