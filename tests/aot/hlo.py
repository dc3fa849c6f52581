"""Reads compiled HLO text, and finds in it what a step must not do."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) .*\{$")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}, m\w+-alias\)")

COLLECTIVES = (
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all",
    "reduce-scatter",
)  # fmt: skip
_VIEWS = re.compile(r"parameter|tuple|get-tuple-element|bitcast|while|conditional|call|async-\w+|[\w-]+-start")
"""They name buffers and make none, or none yet. What the computations of a loop make is looked at there."""
_UPDATES = ("scatter", "dynamic-update-slice")


class Shape(NamedTuple):
    """An array of one device."""

    dtype: str
    dims: tuple[int, ...]
    host: bool = False
    """In host memory: space 5."""

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return self.size * max(1, int(bits[0]) // 8) if bits else self.size

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]{' on the host' if self.host else ''}"


@dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    """The leaves of its result."""
    operands: tuple[str, ...]
    root: bool
    text: str

    def called(self, attribute: str) -> str | None:
        """Name of the computation that an attribute such as `calls` names."""
        found = re.search(rf"{attribute}=%([\w.\-]+)", self.text)
        return found[1] if found else None


@dataclass(frozen=True)
class Program:
    """One device's compiled program."""

    text: str

    @cached_property
    def computations(self) -> dict[str, dict[str, Instruction]]:
        found: dict[str, dict[str, Instruction]] = {}
        body: dict[str, Instruction] = {}
        for line in self.text.splitlines():
            if opening := _COMPUTATION.match(line):
                body = found.setdefault(opening[2], {})
            elif match := _INSTRUCTION.match(line):
                root, name, result, opcode, rest = match.groups()
                operands = tuple(re.findall(r"%([\w.\-]+)", _balanced(rest)))
                body[name] = Instruction(name, opcode, shapes(result), operands, bool(root), line.strip())
        return found

    @cached_property
    def parameters(self) -> tuple[Shape, ...]:
        return shapes(_layout(self.text)[0])

    @cached_property
    def results(self) -> tuple[Shape, ...]:
        return shapes(_layout(self.text)[1])

    @cached_property
    def aliases(self) -> dict[int, int]:
        """Parameter number -> number of the result that takes its buffer."""
        header = self.text.split("\n", 1)[0]
        return {int(parameter): int(result or 0) for result, parameter in _ALIAS.findall(header)}

    def executed(self) -> Iterator[Instruction]:
        """Instructions with buffers of their own: those outside of fusions and of the arithmetic of reductions."""
        inner = {
            name
            for body in self.computations.values()
            for i in body.values()
            for name in (i.called("calls") if i.opcode == "fusion" else None, i.called("to_apply"))
            if i.opcode != "call"
        }
        for name, body in self.computations.items():
            if name not in inner:
                yield from body.values()


def triton_calls(program: Program) -> list[Instruction]:
    """In the order in which they run."""
    custom = (i for i in program.executed() if i.opcode == "custom-call")
    return [i for i in custom if "triton_kernel_call" in i.text.partition("metadata")[0]]


def shapes(text: str) -> tuple[Shape, ...]:
    """All arrays of a type in HLO text."""
    return tuple(
        Shape(dtype, tuple(int(n) for n in dims.split(",") if n), "S(5)" in layout)
        for dtype, dims, layout in _SHAPE.findall(re.sub(r"/\*.*?\*/", "", text))
        if dtype != "token"
    )


def large_buffers(program: Program, sizes: Collection[tuple[str, int]], limit: int) -> list[str]:
    """Instructions that make a new buffer of at least `limit` bytes, or of one of these (dtype, elements).

    A pool may be rewritten in place only: by a scatter or update whose first operand is the whole buffer (XLA makes
    the two one, or says `copy`), or by a kernel that declares its output to be its operand.
    """
    found = []
    for i in program.executed():
        for index, shape in enumerate(i.shapes):
            large = (shape.dtype, shape.size) in sizes or shape.nbytes >= limit
            if large and not _in_place(program, i, index):
                found.append(f"{i.opcode} makes {shape}: {i.text[:200]}")
    return found


def _in_place(program: Program, i: Instruction, index: int) -> bool:
    if _VIEWS.fullmatch(i.opcode) or i.opcode in _UPDATES:
        return True
    if i.opcode == "custom-call":
        output = "{}" if len(i.shapes) == 1 else f"{{{index}}}"
        return f"{output}: (" in i.text.partition("output_to_operand_aliasing={")[2]
    if i.opcode != "fusion":
        return False
    body = program.computations[i.called("calls") or ""]
    made = next(j for j in body.values() if j.root)
    if made.opcode == "tuple":
        made = body[made.operands[index]]
    made = _behind_bitcasts(body, made)
    return made.opcode in _UPDATES and _behind_bitcasts(body, body[made.operands[0]]).opcode == "parameter"


def _behind_bitcasts(body: dict[str, Instruction], i: Instruction) -> Instruction:
    while i.opcode == "bitcast":
        i = body[i.operands[0]]
    return i


def collectives(program: Program) -> Counter[tuple[str, int]]:
    """How often each (kind, bytes of one result on one device) occurs; asynchronous ones count when they are done."""
    found: Counter[tuple[str, int]] = Counter()
    for body in program.computations.values():
        for i in body.values():
            kind = i.opcode.removesuffix("-done")
            if kind in COLLECTIVES:
                found.update((kind, shape.nbytes) for shape in i.shapes)
    return found


def host_programs(program: Program) -> list[str]:
    """Instructions that run on the CPU."""
    marks = ("HostExecute", 'execution_thread="host"')
    return [line.strip()[:200] for line in program.text.splitlines() if any(mark in line for mark in marks)]


def unaliased(program: Program, pools: Collection[Shape]) -> list[str]:
    """Pools (with the memory they must be in) that are no parameter, or whose buffer no equal result takes over."""
    left, found = Counter(pools), []
    for number, shape in enumerate(program.parameters):
        if left[shape]:
            left[shape] -= 1
            result = program.aliases.get(number)
            if result is None or program.results[result] != shape:
                found.append(f"parameter {number}, {shape}: not taken over by a result")
    return found + [f"{shape}: {count} fewer parameters than pools" for shape, count in left.items() if count]


def _layout(text: str) -> tuple[str, str]:
    """Types of the parameters and of the results, from the module's header."""
    header = text.split("\n", 1)[0].partition("entry_computation_layout={")[2]
    inputs = _balanced(header[1:])
    return inputs, _balanced(header[len(inputs) + 2 :].removeprefix("->"))


def _balanced(text: str) -> str:
    """Text up to the parenthesis that closes one opened before it; all of it if none does."""
    depth = 0
    for at, char in enumerate(text):
        depth += (char in "({") - (char in ")}")
        if depth < 0:
            return text[:at]
    return text
