"""What the machine code of a kernel shows: spilled registers, and narrow loads in inner loops.

Reads what `cuobjdump -sass` prints, an instruction a line:

        /*0a40*/                   LDG.E.U16 R5, desc[UR8][R2.64] ;
        /*0a50*/              @P0  BRA 0x9c0 ;
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_TARGET = re.compile(r"0x([0-9a-f]+)")
_NARROW = re.compile(r"LDG\.(?:\w+\.)*[SU](?:8|16)\b")
_SPILLS = ("STL", "LDL")


class Instruction(NamedTuple):
    """One instruction."""

    address: int
    name: str
    """With its modifiers, such as `LDG.E.U16`."""
    operands: str


class Findings(NamedTuple):
    """Counts of instructions in one kernel."""

    spills: int
    """Loads and stores of local memory, where registers did not suffice."""
    narrow_loads: int
    """Loads of less than 4 bytes from global memory within a loop that has no loop in it."""


def instructions_of(sass: str) -> list[Instruction]:
    """Return the instructions of a listing."""
    found = (_INSTRUCTION.search(line) for line in sass.splitlines())
    return [Instruction(int(one[1], 16), one[2], one[3]) for one in found if one]


def findings(instructions: Sequence[Instruction]) -> Findings:
    """Count what slows a kernel down."""
    loops = inner_loops(instructions)
    spills = sum(one.name.partition(".")[0] in _SPILLS for one in instructions)
    narrow = [one for one in instructions if _NARROW.match(one.name)]
    return Findings(spills, sum(any(one.address in loop for loop in loops) for one in narrow))


def inner_loops(instructions: Sequence[Instruction]) -> list[range]:
    """Return the addresses of loops without a loop in them: from the target of a branch back to the branch.

    A branch to itself, which fills the end of a kernel, is none.
    """
    loops = []
    for one in instructions:
        target = _TARGET.search(one.operands) if one.name.startswith("BRA") else None
        if target and int(target[1], 16) < one.address:
            loops.append(range(int(target[1], 16), one.address + 1))
    return [loop for loop in loops if not any(_is_within(other, loop) for other in loops)]


def _is_within(inner: range, outer: range) -> bool:
    return inner != outer and outer.start <= inner.start and inner.stop <= outer.stop
