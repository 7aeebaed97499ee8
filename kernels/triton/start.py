"""Starting the GPU backend: is there a card that it can run on, and everything that Triton needs beside it?

Every answer that is no comes as one line that says what is missing and what to do. Triton is imported where it is asked
for, so that its absence is an answer too.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvd_kernels.triton import tuning
from kvd_kernels.triton.cards import ARCHITECTURES, KNOWN_CARDS, Card, architecture_of

if TYPE_CHECKING:
    from kvd_kernels.triton.ops import TritonOps

OLDEST_TRITON = (3, 6)
CACHE_VARIABLES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_MANAGER")
"""Who sets one of these has decided where compiled kernels are kept."""
DOUBLE_DATA_RATE = 2
"""Transfers per clock of the memory clock that the driver reports."""


class TritonUnavailable(RuntimeError):
    """The GPU backend cannot run here; the message says why and what to do, in one line."""


def create_triton_ops(activation_dtype: torch.dtype = torch.float16, kernel_folder: Path | None = None) -> TritonOps:
    """The backend on the first visible card, after a kernel has run on it.

    activation_dtype: float16 or bfloat16. kernel_folder: where compiled kernels are kept, unless the environment says
    where, and what was measured on this card. TritonUnavailable where it cannot run. Which card is the first is up to
    CUDA_VISIBLE_DEVICES.
    """
    check_triton()
    check_compiler()
    if kernel_folder is not None and not any(os.environ.get(name) for name in CACHE_VARIABLES):
        os.environ["TRITON_CACHE_DIR"] = str(kernel_folder)
    # Kernels that must not fuse say so themselves; from 3.8 on Triton warns where nobody has said anything.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    properties = first_card()
    card, notice = describe(properties)
    check_torch_runs_on(properties, torch.cuda.get_arch_list())
    try_kernel()
    from kvd_kernels.triton.ops import TritonOps

    ops = TritonOps(torch.device("cuda", 0), card, activation_dtype)
    ops.device_id = str(getattr(properties, "uuid", ""))
    notices = [notice] if notice else []
    ops.use_tuning(tuning.load(card, notices.append, kernel_folder and kernel_folder / tuning.FOLDER))
    ops.notices = tuple(notices)
    return ops


def check_triton() -> None:
    """TritonUnavailable where Triton is missing, too old, or set to interpret."""
    try:
        import triton
    except ImportError as error:
        raise TritonUnavailable(
            f"Triton cannot be imported ({error}); it comes with the CUDA build of torch, or by: pip install triton"
        ) from None
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        raise TritonUnavailable(f"Triton {triton.__version__} is too old; kvd needs {oldest} or later")
    if triton.knobs.runtime.interpret:
        raise TritonUnavailable("TRITON_INTERPRET is set, which is for tests: unset it to compute on the GPU")


def check_compiler() -> None:
    """TritonUnavailable where there is no C compiler or no Python.h, which Triton needs to launch kernels."""
    named = os.environ.get("CC")
    if named is not None and shutil.which(named.split()[0] if named.strip() else "") is None:
        raise TritonUnavailable(
            f"Triton needs a C compiler to launch kernels, and CC names {named!r}, which is not there"
        )
    if named is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        raise TritonUnavailable(
            "Triton needs a C compiler to launch kernels, and there is none: install one (Debian: apt-get install gcc)"
        )
    scheme = sysconfig.get_default_scheme()
    # Debian's scheme for locally installed packages names a folder that has no headers; Triton looks here as well.
    paths = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)
    header = Path(paths["include"]) / "Python.h"
    if not header.is_file():
        raise TritonUnavailable(
            f"Triton needs the headers of Python to launch kernels, and {header} is missing: install them (Debian: "
            f"apt-get install python3-dev)"
        )


def first_card() -> Any:
    """torch's properties of card 0; TritonUnavailable where torch sees none."""
    if torch.version.cuda is None:
        raise TritonUnavailable(
            f"torch {torch.__version__} was built without CUDA: install the CUDA build (KVD_TORCH chooses one for make)"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say comes as an error, too
            torch.cuda.init()  # type: ignore[no-untyped-call]
            if not torch.cuda.device_count():
                raise TritonUnavailable(
                    "CUDA sees no card: does nvidia-smi list one, and is CUDA_VISIBLE_DEVICES right?"
                )
            return torch.cuda.get_device_properties(0)
    except RuntimeError as error:
        if isinstance(error, TritonUnavailable):
            raise
        raise TritonUnavailable(f"CUDA does not start: {_first_sentence(str(error))}") from None


def describe(properties: Any) -> tuple[Card, str]:
    """The card, and a line for the user where it is none that launch configurations were chosen for.

    properties: as torch.cuda.get_device_properties gives them. TritonUnavailable for an architecture without kernels.
    """
    architecture = architecture_of(properties.major, properties.minor)
    if architecture is None:
        known = ", ".join(f"{each // 10}.{each % 10}" for each in ARCHITECTURES)
        raise TritonUnavailable(
            f"{properties.name} has compute capability {properties.major}.{properties.minor}, for which kvd has no "
            f"kernels; it has them for {known}"
        )
    name = properties.name.removeprefix("NVIDIA ")
    for card in KNOWN_CARDS:
        if card.name == name and card.num_sms == properties.multi_processor_count:
            return card, ""
    relative = min(
        (card for card in KNOWN_CARDS if card.architecture == architecture),
        key=lambda card: abs(card.num_sms - properties.multi_processor_count),
    )
    # Kilohertz and bits. Absent in older torch, and zero where the driver does not tell.
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    bandwidth = DOUBLE_DATA_RATE * clock * 1000.0 * (width / 8) if clock and width else relative.bytes_per_second
    l2_bytes = getattr(properties, "L2_cache_size", 0) or relative.l2_bytes
    card = Card(name, architecture, properties.multi_processor_count, bandwidth, l2_bytes)
    source = "as the driver says" if clock and width else f"as of a {relative.name}"
    return card, (
        f"{name} is none of the cards that launch configurations were chosen for; they are chosen by its "
        f"{card.num_sms} multiprocessors and {bandwidth / 1e9:.0f} GB/s, {source}"
    )


def check_torch_runs_on(properties: Any, arch_list: list[str]) -> None:
    """TritonUnavailable where this torch was built without code for the card. arch_list: "sm_86", "compute_90", …"""
    capability = 10 * properties.major + properties.minor
    for name in arch_list:
        kind, _, number = name.partition("_")
        built = int("".join(filter(str.isdigit, number)) or 0)
        # Machine code runs on later minor versions; intermediate code on everything later.
        if kind == "compute" and built <= capability:
            return
        if kind == "sm" and built // 10 == properties.major and built <= capability:
            return
    raise TritonUnavailable(
        f"this torch has no code for compute capability {properties.major}.{properties.minor} ({properties.name}), "
        f"only for {', '.join(arch_list)}: install a later CUDA build of torch"
    )


def try_kernel() -> None:
    """Compile a kernel, run it, look at what it did; TritonUnavailable with the first line of what went wrong."""
    from kvd_kernels.triton.token_kernels import keep_tokens

    try:
        newest = torch.zeros(4, dtype=torch.int64, device="cuda")
        slots = torch.tensor([2, 0], dtype=torch.int64, device="cuda")
        keep_tokens(2, slots, torch.tensor([7, -1], dtype=torch.int64, device="cuda"), newest)
        found = newest.tolist()
    except Exception as error:  # compilers, linkers and drivers raise what they like
        reason = f"{type(error).__name__}: {_first_sentence(str(error))}"
        raise TritonUnavailable(f"a kernel for trial does not run: {reason}") from error
    if found != [0, 0, 7, 0]:
        raise TritonUnavailable(f"a kernel for trial computed {found} in place of [0, 0, 7, 0]")


def _first_sentence(text: str) -> str:
    """One line of what may be a page."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0].split(". ")[0].rstrip(".") if lines else "no reason given"
