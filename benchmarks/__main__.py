"""Check every kernel on this machine against its reference, on fresh random inputs, and time all its forms in one run.

Prints a table and writes JSON: microseconds by the host's clock and by the card's, and by the card's (where there is
one) the speed-up over the base form, the percentage of what the card could do at best (the floor: bytes or operations
over rates measured in this run), and whether the bar is met.
"""

import importlib
import pkgutil
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.table import Table

import benchmarks
from benchmarks import card
from benchmarks.case import Case
from benchmarks.timing import Timing, first_result, per_call
from ula_jax.report import environment, print_table, report, stderr

PARTS = {"case", "card", "driven", "glm_slice", "multi_gpu", "timing", "__main__"}


@dataclass(frozen=True)
class Config:
    only: tuple[str, ...] = ()
    """Modules of this package to run, all of them if none is named."""
    forms: tuple[str, ...] = ()
    """Forms to time, all of them if none is named. The base form is always among them."""
    bars: bool = False
    """Run only the cases that have a bar."""
    repeats: int = 9
    seed: int = 0
    small: bool = False
    """Shapes for a CPU: everything is checked, and no form is worth timing but the base form."""
    out: Path = Path("results")


def modules() -> list[str]:
    """The benchmarks: one module a kernel, with a function `cases(rng, small)` that yields them."""
    return sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name not in PARTS)


def run(config: Config) -> dict[str, Any]:
    """One row for each case and form."""
    if unknown := set(config.only) - set(modules()):
        raise ValueError(f"only: expected some of {modules()}, found {sorted(unknown)}; correct the names")
    rates = card.measure(*((8, 128) if config.small else (2048, 8192)))
    rows: list[dict[str, Any]] = []
    for name in config.only or modules():
        module = importlib.import_module(f"benchmarks.{name}")
        for case in module.cases(np.random.default_rng(config.seed), config.small):
            if config.bars and not (case.bar or case.ratio):
                continue
            for row in _measure(case, rates, config):
                stderr.log(" | ".join(_cells(row)))
                rows.append(row)
    return {"rates": asdict(rates), "rows": rows, **environment()}


def _measure(case: Case, rates: card.Rates, config: Config) -> list[dict[str, Any]]:
    floor = rates.floor(case.device_bytes, case.link_bytes, case.flops)
    rows: list[dict[str, Any]] = []
    base = None
    names = [case.base, *(f for f in case.forms if f != case.base and (not config.forms or f in config.forms))]
    for form in [*(n for n in names if n in case.forms), *(case.outside or {})]:
        row: dict[str, Any] = {"kernel": case.kernel, "shape": case.shape, "form": form, "bar": _bar(case)}
        try:
            if form in case.forms:
                wrong = case.check(form, first_result(case, form), case.calls[0]) if case.check else "not checked"
                if wrong is None and config.small and form != case.base:
                    rows.append(row | {"wrong": None})
                    continue
                timing = per_call(case, form, config.repeats)
            else:
                wrong, timing = None, Timing((case.outside or {})[form](), 0.0, None)
            us = timing.device_us or timing.us
            base = us if form == case.base else base
            row |= {**timing._asdict(), "speedup": base and base / us, "of_floor": floor / us, "wrong": wrong}
            row["met"] = _met(case, us, row["speedup"])
        except Exception as error:  # a form that fails is a result, and the others still run
            stderr.log(traceback.format_exc(limit=-4))
            row |= {"wrong": f"{type(error).__name__}: {str(error)[:300]}"}
        rows.append(row)
    return rows


def _bar(case: Case) -> str | None:
    if case.bar:
        return f"{case.bar:.0f} us"
    return f"{case.ratio:.2f} x" if case.ratio else None


def _met(case: Case, us: float, speedup: float | None) -> bool | None:
    if case.bar:
        return us <= case.bar
    return speedup >= case.ratio if case.ratio and speedup else None


def _cells(row: dict[str, Any]) -> list[str]:
    met = "" if row.get("met") is None else "met" if row["met"] else "missed"
    return [
        row["kernel"],
        row["shape"],
        row["form"],
        *(f"{row[k]:.1f}" if row.get(k) is not None else "" for k in ("us", "spread", "device_us")),
        f"{row['speedup']:.2f}" if row.get("speedup") else "",
        f"{row['of_floor']:.0%}" if row.get("of_floor") else "",
        f"{row['bar']} {met}" if row["bar"] else "",
        row["wrong"] or "",
    ]


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    result = run(config)
    table = Table(
        "kernel", "shape", "form", "us", "+-", "on the card", "speed-up", "of floor", "bar", "wrong",
        title=result["devices"], title_justify="left",
    )
    for row in result["rows"]:
        table.add_row(*_cells(row))
    print_table(table)
    report(result, config.out, "benchmarks")
    if any(row["wrong"] for row in result["rows"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
