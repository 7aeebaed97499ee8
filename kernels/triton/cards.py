"""What a card can do, as far as the choice of a launch configuration depends on it. Torch-free; stateless.

Figures of the published data sheets, except for limits of shared memory and registers, which are those of the
architecture (CUDA C++ Programming Guide, technical specifications per compute capability).
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
ARCHITECTURES = (80, 86, 89, 90, 120)
"""Compute capabilities, major · 10 + minor, that kvd compiles for and proves ahead of time."""

SHARED_BYTES = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 120: 99 * KIB}
"""Most shared memory of one thread block."""


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU model.

    architecture      one of ARCHITECTURES, the one whose code the card runs
    num_sms           streaming multiprocessors
    bytes_per_second  memory bandwidth by the data sheet
    l2_bytes          second-level cache
    """

    name: str
    architecture: int
    num_sms: int
    bytes_per_second: float
    l2_bytes: int

    @property
    def shared_bytes(self) -> int:
        return SHARED_BYTES[self.architecture]


MIB = KIB * KIB
KNOWN_CARDS = (
    Card("A100-SXM4-80GB", 80, 108, 2039e9, 40 * MIB),
    Card("GeForce RTX 3090", 86, 82, 936e9, 6 * MIB),
    Card("RTX A6000", 86, 84, 768e9, 6 * MIB),
    Card("GeForce RTX 4090", 89, 128, 1008e9, 72 * MIB),
    Card("RTX 6000 Ada Generation", 89, 142, 960e9, 96 * MIB),
    Card("H100 80GB HBM3", 90, 132, 3350e9, 50 * MIB),
    Card("H200", 90, 132, 4800e9, 50 * MIB),
    Card("GeForce RTX 5090", 120, 170, 1792e9, 96 * MIB),
)
"""One or more per architecture; for these the choices of the tables are tested."""


def architecture_of(major: int, minor: int) -> int | None:
    """The architecture whose kernels a card of this compute capability runs; None where kvd has none for it.

    Within a major version code of a lower minor version runs on a higher one. 10.x has no entry: its code is its own.
    """
    fitting = [known for known in ARCHITECTURES if known // 10 == major and known % 10 <= minor]
    return max(fitting, default=None)
