"""Placements by name. To add one: a file beside these, and a line in PLACEMENTS."""

from collections.abc import Mapping
from typing import Any

from ula_jax.parallel import Parallel
from ula_jax.placements.base import Placement
from ula_jax.placements.gpu_only import GpuOnly
from ula_jax.placements.hisparse import HiSparse
from ula_jax.placements.owner_computes import OwnerComputes
from ula_jax.placements.resident_hot import ResidentHot
from ula_jax.placements.ula import Ula
from ula_jax.plugins import make

PLACEMENTS: dict[str, type] = {
    "gpu_only": GpuOnly, "hisparse": HiSparse, "owner_computes": OwnerComputes, "resident_hot": ResidentHot, "ula": Ula,
}  # fmt: skip


def make_placement(
    spec: str, parallel: Parallel, if_taken: Mapping[str, Any] | None = None, **given: Any
) -> Placement:
    """A placement from `name`, `name:parameter=value,...` or `path.py:Class`, with or without parameters after it.

    `given` are further parameters; those of `if_taken` are left out where the placement has none of the name.
    """
    placement = make("placement", PLACEMENTS, spec, if_taken, parallel=parallel, **given)
    if not isinstance(placement, Placement):
        missing = [name for name in dir(Placement) if not name.startswith("_") and not hasattr(placement, name)]
        raise ValueError(f"placement: {type(placement).__name__} in {spec!r} lacks {', '.join(missing)}; add them")
    return placement


__all__ = ["PLACEMENTS", "GpuOnly", "HiSparse", "OwnerComputes", "Placement", "ResidentHot", "Ula", "make_placement"]
