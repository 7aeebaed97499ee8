"""The ops contract in plain torch, written to be read.

`ReferenceOps` (a8) states the arithmetic of the CPU, byte for byte, and serves where no native kernels run;
`ReferenceOps16` (a16) is the oracle of the GPU kernels.
"""

from kvd_kernels.reference.a8 import ReferenceOps
from kvd_kernels.reference.a16 import ReferenceOps16

__all__ = ["ReferenceOps", "ReferenceOps16"]
