"""One compiled form of a kernel, as the tables of launch configurations can select it. Torch-free; stateless.

Each kernel module has `variants(card, dtype)`: every form that its table selects on that card for activations of that
dtype, whatever the model. The ahead-of-time check compiles them all and holds each to its `Budget`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

ActivationType = Literal["fp16", "bf16"]
ACTIVATION_TYPES: tuple[ActivationType, ...] = ("fp16", "bf16")


@dataclass(frozen=True, slots=True)
class Budget:
    """What the machine code may cost at most.

    elements_per_iteration     weights (or K and V elements) that one thread block handles in one pass of its main loop;
                               0: the kernel has no loop that is to be counted
    instructions_per_element   issued per element and thread in that loop, all instructions of its body counted
    min_wide_loads             16-byte loads from global memory (LDG.128, LDGSTS.128) that the code must hold at least
    """

    elements_per_iteration: int = 0
    instructions_per_element: float = 0.0
    min_wide_loads: int = 0


@dataclass(frozen=True, slots=True)
class Variant:
    """kernel: a `triton.jit` function. signature: Triton's type of every argument by name, in order, "constexpr" for
    those in `constants`. divisible: arguments that are multiples of 16 (pointers: aligned to 16 bytes). options: what
    else the launch passes, such as enable_fp_fusion (True where nothing is said) or maxnreg, without which ptxas may
    spill, above all on sm_86 and sm_89, to fit one block more onto a multiprocessor.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    divisible: tuple[str, ...]
    budget: Budget = Budget()
    options: dict[str, Any] = field(default_factory=dict)
