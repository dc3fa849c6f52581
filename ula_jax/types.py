"""Sentinels and array aliases shared by every module. Words are defined in docs/design.md."""

from jaxtyping import Array, Bool, Float32, Int32, UInt32

EMPTY = -1
"""No address, no slot: padding in every integer list."""

NOWHERE = -(2**31)
"""Location of an address that holds no row. Device slots are >= 0, host slots are bitwise-not of the slot."""

Scalar = Int32[Array, ""]
Addresses = Int32[Array, "..."]
Slots = Int32[Array, " n"]
Lanes = tuple[UInt32[Array, "..."], ...]
"""A row format's parallel word arrays: (words,) or, for fp8, (words, scales)."""

__all__ = [
    "EMPTY", "NOWHERE", "Addresses", "Array", "Bool", "Float32", "Int32", "Lanes", "Scalar", "Slots", "UInt32",
]
