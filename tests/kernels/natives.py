"""Native backends at every ISA level, for tests that compare bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd_kernels.cpu.library import Library
from kvd_kernels.cpu.ops import CpuOps

LEVELS = ("portable", "avx2", "avxvnni", "avx512vnni", "amx")


@dataclass
class Natives:
    """Backends of one library and level, made on demand and ended together."""

    library: Library
    level: str
    made: dict[int, CpuOps] = field(default_factory=dict)

    def with_threads(self, count: int) -> CpuOps:
        if count not in self.made:
            self.made[count] = CpuOps(count, self.level, self.library)
        return self.made[count]

    def close(self) -> None:
        for ops in self.made.values():
            ops.pool.close()
