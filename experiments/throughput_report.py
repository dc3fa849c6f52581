"""What `experiments.throughput` makes of its points: comparisons, a table and a figure."""

from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.stage_times import STAGES
from ula_jax.report import print_table

Point = dict[str, Any]


def bars(points: list[Point]) -> dict[str, Any]:
    """What `ula` must reach, as ratios above 1 in its favour; only those whose points are there.

    `resident`: speed of a step at batch 1 beside `gpu_only`, everything on the device (at least 1 / 1.02).
    `equal_batch`: throughput at each batch beside the best of the others (at least 0.98).
    `peak`: best throughput beside that of `hisparse` (at least 1.16).
    """
    speed = {(point["placement"], point["batch"]): point["tokens_per_s"] for point in points}
    mine = {batch: value for (name, batch), value in speed.items() if name == "ula"}
    found: dict[str, Any] = {}
    if 1 in mine and ("gpu_only", 1) in speed:
        found["resident"] = mine[1] / speed["gpu_only", 1]
    others = {b: max((v for (n, at), v in speed.items() if n != "ula" and at == b), default=None) for b in mine}
    found["equal_batch"] = {batch: mine[batch] / best for batch, best in others.items() if best}
    hisparse = [value for (name, _), value in speed.items() if name.partition(":")[0] == "hisparse"]
    if mine and hisparse:
        found["peak"] = max(mine.values()) / max(hisparse)
    return found


def show(result: dict[str, Any]) -> None:
    points: list[Point] = result["points"]
    peaks = {id(point) for point in _peaks(points)}
    table = Table(title=f"decode on {result['devices']}; * is a placement's peak", title_justify="left")
    headers = (
        "placement", "batch", "of", "tokens/s", "step ms", "TPOT ms", "p95", "hit rate", "H2D MB", "D2H MB",
        "H2D GB/s", "D2H GB/s", "KV GB",
    )  # fmt: skip
    for header in headers:
        table.add_column(header, justify="left" if header == "placement" else "right")
    for point in points:
        held = point["device_rows_bytes"] + point["index_key_bytes"]
        rates = (point["h2d_gb_s"], point["d2h_gb_s"])
        table.add_row(
            point["placement"], str(point["batch"]), str(point["admitted"]),
            f"{point['tokens_per_s']:,.0f}{'*' if id(point) in peaks else ' '}", f"{point['step_ms']:.2f}",
            f"{point['tpot_ms']:.2f}", f"{point['tpot_p95_ms']:.2f}", f"{point['hit_rate']:.1%}",
            f"{point['h2d_bytes'] / 1e6:.1f}", f"{point['d2h_bytes'] / 1e6:.1f}",
            *("" if rate is None else f"{rate:.1f}" for rate in rates), f"{held / 1e9:.2f}",
        )  # fmt: skip
    print_table(table)
    stages = [name for name in (*STAGES, "other", "idle") if any(name in point["stages_ms"] for point in points)]
    if stages:
        table = Table("placement", "batch", *stages, title="ms of a step by stage", title_justify="left")
        for point in points:
            cells = (f"{point['stages_ms'].get(name, 0.0):.2f}" for name in stages)
            table.add_row(point["placement"], str(point["batch"]), *cells)
        print_table(table)
    for name, ratio in result["bars"].items():
        print(f"ula, {name}: {ratio if not isinstance(ratio, dict) else _line(ratio)}")


def plot(result: dict[str, Any], path: Path) -> None:
    """Throughput and time of a token over the batch, and the stages of every placement's peak."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    points: list[Point] = result["points"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 5), layout="constrained")
    peaks = _peaks(points)
    for number, peak in enumerate(peaks):
        mine = sorted((p for p in points if p["placement"] == peak["placement"]), key=lambda p: p["batch"])
        style = {"color": f"C{number}", "marker": "o", "label": peak["placement"]}
        left.plot([p["batch"] for p in mine], [p["tokens_per_s"] for p in mine], **style)
        left.plot(peak["batch"], peak["tokens_per_s"], "*", color=f"C{number}", markersize=16)
        middle.plot([p["batch"] for p in mine], [p["tpot_ms"] for p in mine], **style)
    left.set(title="throughput; the star is the peak", xlabel="requests", ylabel="tokens/s")
    middle.set(title="time of a token", xlabel="requests", ylabel="median, ms")
    left.legend()
    start = [0.0] * len(peaks)
    names = [f"{peak['placement']} x {peak['batch']}" for peak in peaks]
    for number, stage in enumerate((*STAGES, "other", "idle")):
        times = [peak["stages_ms"].get(stage, 0.0) for peak in peaks]
        if any(times):
            right.barh(names, times, left=start, label=stage, color=plt.get_cmap("tab20")(number))
            start = [a + b for a, b in zip(start, times, strict=True)]
    right.set(title="a step at the peak", xlabel="ms")
    right.invert_yaxis()
    if any(start):
        right.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4)
    for axes in (left, middle):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.suptitle(f"one GPU's share of GLM-5.3 under DP, equal memory, {result['devices']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _peaks(points: list[Point]) -> list[Point]:
    names = dict.fromkeys(point["placement"] for point in points)
    return [max((p for p in points if p["placement"] == name), key=lambda p: p["tokens_per_s"]) for name in names]


def _line(ratios: dict[int, float]) -> str:
    return ", ".join(f"{batch}: {ratio:.3f}" for batch, ratio in ratios.items())
