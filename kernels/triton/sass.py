"""Reads machine code of a GPU: what a compiled kernel takes, and what its main loop costs. Torch-free; stateless.

The disassemblers are those of triton's wheel, so neither a CUDA toolkit nor a GPU is needed.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_LABEL = re.compile(r"^(\.L\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_RESOURCE = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")
_MATRIX = {"HMMA", "IMMA", "QMMA", "OMMA", "HGMMA", "IGMMA", "QGMMA"}
_BULK_LOADS = {"UBLKCP", "UTMALDG"}
_LOCAL = {"LDL", "STL"}


@dataclass(frozen=True, slots=True)
class Instruction:
    """opcode: the mnemonic with its modifiers (LDG.E.128). target: the label of a branch, or ""."""

    opcode: str
    target: str = ""

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def loaded_bytes(self) -> int:
        """What one thread reads from global memory; 0 for a bulk copy, whose size stands in a register."""
        parts = self.opcode.split(".")
        if parts[0] not in ("LDG", "LDGSTS"):
            return 0
        widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
        return max((widths[part] for part in parts if part in widths), default=4)

    @property
    def is_wide_load(self) -> bool:
        """Moves at least 16 bytes per thread from global memory."""
        return self.loaded_bytes >= 16 or self.name in _BULK_LOADS


@dataclass(frozen=True, slots=True)
class Resources:
    """As the assembler states them, largest of all functions: registers per thread, bytes of frame and of local memory
    per thread, bytes of shared memory of fixed size.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Code:
    """instructions: of all functions, in order. labels: the place in that order which a label names."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    @property
    def wide_loads(self) -> int:
        return sum(instruction.is_wide_load for instruction in self.instructions)

    @property
    def local_accesses(self) -> int:
        """Loads and stores of local memory: what spilled, or an array that the compiler could not keep in registers."""
        return sum(instruction.name in _LOCAL for instruction in self.instructions)

    def loops(self) -> list[tuple[int, int]]:
        """First and last place of the body of every backward branch. A branch to itself is padding behind the exit."""
        found = []
        for place, instruction in enumerate(self.instructions):
            start = self.labels.get(instruction.target, place)
            if start < place:
                found.append((start, place))
        return found

    def main_loop(self) -> tuple[Instruction, ...]:
        """The body of the loop that does the work; empty where the code has no loop.

        Of the loops without another such loop inside: those with products of matrices or 16-byte loads where there are
        any, and of them the one with the most instructions.
        """
        loops = self.loops()
        working = [loop for loop in loops if any(map(_is_work, self._body(loop)))] or loops
        innermost = [outer for outer in working if not any(_is_inside(inner, outer) for inner in working)]
        return max((self._body(loop) for loop in innermost), key=len, default=())

    def _body(self, loop: tuple[int, int]) -> tuple[Instruction, ...]:
        return self.instructions[loop[0] : loop[1] + 1]


def _is_work(instruction: Instruction) -> bool:
    return instruction.is_wide_load or instruction.name in _MATRIX


def _is_inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    """Loops of one start are one loop with several ways back: the longest stands for all."""
    if inner[0] == outer[0]:
        return outer[1] < inner[1]
    return outer[0] < inner[0] and inner[1] <= outer[1]


def count_matrix(instructions: Sequence[Instruction]) -> int:
    """Products of matrices among them."""
    return sum(instruction.name in _MATRIX for instruction in instructions)


def parse_listing(listing: str) -> Code:
    """Read the output of `nvdisasm -c`. ValueError where it holds no instruction."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.match(line):
            target = _TARGET.search(found[3])
            is_jump = found[2].partition(".")[0] in ("BRA", "BRX", "JMP")
            instructions.append(Instruction(found[2], target[1] if target and is_jump else ""))
    if not instructions:
        raise ValueError("the disassembler's output holds no instruction")
    return Code(tuple(instructions), labels)


def parse_resources(listing: str) -> Resources:
    """Read the output of `cuobjdump --dump-resource-usage`. ValueError where a figure is missing."""
    largest: dict[str, int] = {}
    for name, value in _RESOURCE.findall(listing):
        largest[name] = max(largest.get(name, 0), int(value))
    try:
        return Resources(largest["REG"], largest["STACK"], largest["LOCAL"], largest["SHARED"])
    except KeyError as missing:
        raise ValueError(f"the resource usage holds no {missing.args[0]}") from None


def tool(name: str) -> Path:
    """A program of triton's wheel. FileNotFoundError where this build of triton has none."""
    import triton

    assert triton.__file__ is not None
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise FileNotFoundError(f"this triton has no {name}: {path}")
    return path


def disassemble(cubin: Path) -> Code:
    """The instructions of a compiled kernel. CalledProcessError where the tool refuses it."""
    listing = subprocess.run([tool("nvdisasm"), "-c", "-ndf", cubin], check=True, capture_output=True, text=True)
    return parse_listing(listing.stdout)


def resources(cubin: Path) -> Resources:
    """What a compiled kernel takes. CalledProcessError where the tool refuses it."""
    command = [str(tool("cuobjdump")), "--dump-resource-usage", str(cubin)]
    return parse_resources(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
