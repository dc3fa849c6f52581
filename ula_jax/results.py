"""Replay results: kept in a parquet file that later runs add to, summed up per policy and size, and drawn."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.table import Table

from ula_jax.replay import SCHEMA
from ula_jax.report import replacing
from ula_jax.traces.trace import Trace

KEYED = SCHEMA.append(pa.field("key", pa.string())).append(pa.field("about", pa.string()))
"""`key` says what was played, `about` (JSON: command, versions, hardware, date) by what."""

CODE = Path(__file__).parent
"""Whose policies and replay decide the results."""


class Store:
    """Finished rows of `ula_jax.replay` in one parquet file, by what produced them."""

    def __init__(self, path: Path, trace: Trace, warmup: int):
        code = hashlib.sha256()
        for file in (*sorted(CODE.glob("policies/*.py")), CODE / "replay.py"):
            code.update(file.read_bytes())
        self.path, self._played = path, f"{fingerprint(trace)} {warmup} {code.hexdigest()}"
        self.rows = KEYED.empty_table()
        if path.is_file():
            try:
                self.rows = pq.read_table(path).select(KEYED.names).cast(KEYED)
            except (pa.ArrowException, KeyError, OSError) as wrong:
                raise ValueError(
                    f"{path}: expected results of an earlier replay, found something else ({wrong}); move it away"
                ) from wrong

    def key(self, policy: str) -> str:
        """Identifies trace, warm-up, policy and the code that plays it, files named in the policy among it."""
        digest = hashlib.sha256(f"{self._played} {policy}".encode())
        for file in map(Path, re.findall(r"[^\s:=,]+\.py", policy)):
            if file.is_file():
                digest.update(file.read_bytes())
        return digest.hexdigest()[:16]

    def missing(self, policy: str, sizes: Iterable[int]) -> list[int]:
        """Sizes at which the policy has not been played yet."""
        done = set(self._of(policy).column("size").to_pylist())
        return [size for size in sizes if size not in done]

    def add(self, policy: str, table: pa.Table, about: dict[str, Any]) -> None:
        """Write the rows to the file, each with `about`: command, versions, hardware, date."""
        keys, made = [self.key(policy)] * table.num_rows, [json.dumps(about)] * table.num_rows
        for name, values in (("key", keys), ("about", made)):
            table = table.append_column(name, pa.array(values, pa.string()))
        self.rows = pa.concat_tables([self.rows, table])
        with replacing(self.path) as scratch:
            pq.write_table(self.rows, scratch, compression="zstd")

    def table(self, policies: Sequence[str], sizes: Sequence[int]) -> pa.Table:
        """Rows of these policies and sizes."""
        found = pa.concat_tables([self._of(policy) for policy in policies])
        return found.filter(pc.field("size").isin(list(sizes)))

    def _of(self, policy: str) -> pa.Table:
        return self.rows.filter(pc.field("key") == self.key(policy))


def fingerprint(trace: Trace) -> str:
    """Of the selections, scores and row sizes; not of names or metadata."""
    digest = hashlib.sha256(f"{trace.k} {trace.length} {trace.row_bytes}".encode())
    for array in (trace.positions, trace.finished, trace.scores):
        if array is not None:
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def summarize(table: pa.Table, best: str = "belady") -> list[dict[str, Any]]:
    """One row for each (policy, size), over all streams; in the order of the table.

    `fetch_bytes` cross the link to the device (needed and prefetched rows), `write_bytes` leave it under an exclusive
    placement. `gap_to_belady` is the miss ratio minus that of `best` at the same size: below 0 only for policies that
    prefetch, None if `best` is not in the table.
    """
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        groups.setdefault((row["policy"], row["size"]), []).append(row)
    rows = []
    for (policy, size), parts in groups.items():
        accesses = sum(part["accesses"] for part in parts)
        rows.append(
            {
                "policy": policy,
                "size": size,
                "miss_ratio": sum(part["misses"] for part in parts) / accesses if accesses else 0.0,
                "fetch_bytes": sum((part["misses"] + part["prefetched"]) * part["row_bytes"] for part in parts),
                "prefetch_bytes": sum(part["prefetched"] * part["row_bytes"] for part in parts),
                "write_bytes": sum(part["written_back"] * part["row_bytes"] for part in parts),
            }
        )
    optimum = {row["size"]: row["miss_ratio"] for row in rows if row["policy"] == best}
    for row in rows:
        found = optimum.get(row["size"])
        row["gap_to_belady"] = None if found is None else row["miss_ratio"] - found
    return rows


def miss_table(rows: list[dict[str, Any]], unit: int, rounds: int) -> Table:
    """Policies by sizes: miss ratio, points above Belady, and bytes fetched in a round."""
    sizes = sorted({row["size"] for row in rows})
    title = f"miss ratio (points above Belady), bytes fetched a round; k is one selection of {unit} rows"
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    for size in sizes:
        table.add_column(f"{size / unit:g}k", justify="right")
        table.add_column("fetched", justify="right")
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = []
        for size in sizes:
            row = next((r for r in rows if r["policy"] == policy and r["size"] == size), None)
            if row is None:
                cells += ["", ""]
                continue
            gap = "" if row["gap_to_belady"] is None else f" ({100 * row['gap_to_belady']:+.2f})"
            cells += [f"{row['miss_ratio']:.2%}{gap}", f"{row['fetch_bytes'] / rounds:,.0f}"]
        table.add_row(policy, *cells)
    return table


def draw(table: pa.Table, rows: list[dict[str, Any]], unit: int, warmup: int, path: Path, title: str) -> None:
    """Miss ratio by size, and over time at the middle size; `warmup` rounds are not in the table's sums."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    sizes = sorted({row["size"] for row in rows})
    middle = sizes[len(sizes) // 2]
    played = table.to_pylist()
    for number, policy in enumerate(dict.fromkeys(row["policy"] for row in rows)):
        style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3], "label": policy}
        mine = sorted((row["size"] / unit, 100 * row["miss_ratio"]) for row in rows if row["policy"] == policy)
        left.plot(*zip(*mine, strict=True), marker="o", **style)
        parts = [row for row in played if row["policy"] == policy and row["size"] == middle]
        if parts:
            misses = np.sum([part["misses_by_round"] for part in parts], axis=0)
            each = sum(part["accesses"] for part in parts) / (len(misses) - warmup)
            width = max(1, len(misses) // 60)
            steps = len(misses) // width
            right.plot(
                (np.arange(steps) + 0.5) * width,
                100 * misses[: steps * width].reshape(steps, width).mean(axis=1) / each,
                **style,
            )
    left.set(title="by pool size", xlabel=f"slots, in selections of {unit} rows", ylabel="miss ratio, %")
    right.set(title=f"over time at {middle / unit:g}k", xlabel="round")
    for axes in (left, right):
        axes.set_yscale("log")
        for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            axis(lambda value, _: f"{value:g}")
        axes.grid(alpha=0.3, which="both", axis="y")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
