"""The implementations that the whole suite runs for. A new backend joins by one line."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator

import native_build
import pytest
import torch

from kvd_kernels.cpu.library import Library, installed_library, open_library
from kvd_kernels.ops import Ops
from kvd_kernels.registry import create_ops
from tests.kernels import triton_share
from tests.kernels.natives import LEVELS, Natives

# Before triton is first imported: its decorator asks when it wraps a kernel.
os.environ["TRITON_INTERPRET"] = "1"

TRITON = ("triton", "triton-bf16")
IMPLEMENTATIONS = ("reference", "reference-a16", "cpu", *TRITON)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """See `triton_share`."""
    dropped, num_cases = [], 0
    for item in items:
        if not triton_share.is_triton(item.nodeid):
            continue
        if triton_share.is_cross_product(item.nodeid):
            num_cases += 1
            if num_cases % triton_share.KEPT_OF_CROSS_PRODUCT:
                dropped.append(item)
        elif not triton_share.is_quick(item.nodeid):
            item.add_marker(pytest.mark.full)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        gone = set(map(id, dropped))
        items[:] = [item for item in items if id(item) not in gone]


def make_ops(name: str) -> Ops:
    """An implementation by its name in test ids; the Triton kernels run in Triton's interpreter."""
    if name not in TRITON:
        return create_ops(name)
    from kvd_kernels.triton.cards import KNOWN_CARDS
    from kvd_kernels.triton.ops import TritonOps

    return TritonOps(torch.device("cpu"), KNOWN_CARDS[0], torch.bfloat16 if name == "triton-bf16" else torch.float16)


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return make_ops(request.param)


@pytest.fixture(params=["reference", "cpu"])
def exact_ops(request: pytest.FixtureRequest) -> Ops:
    """The implementations that promise the same bits in every batch."""
    made = create_ops(request.param)
    assert made.arithmetic == "a8"
    return made


@pytest.fixture(scope="session")
def emulated_library() -> Library:
    """All ISA levels with their instructions replaced by plain C++, so that this processor runs their code.

    Built once per state of the sources, into build/native.
    """
    sources = sorted(native_build.SOURCES.iterdir())
    state = hashlib.blake2b(b"".join(path.read_bytes() for path in sources), digest_size=8).hexdigest()
    target = native_build.ROOT / "build" / "native" / f"emulated-{state}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "emulated.lock").open("w") as lock:  # tests run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            for old in target.parent.glob("emulated-*.so"):
                old.unlink()
            native_build.build_library(target, emulate=True)
    return open_library(target)


@pytest.fixture(
    scope="module", params=[(build, level) for build in ("native", "emulated") for level in LEVELS], ids="-".join
)
def natives(request: pytest.FixtureRequest) -> Iterator[Natives]:
    """Levels that this processor has, as they are built; and all of them in the emulated build."""
    build, level = request.param
    library = installed_library() if build == "native" else request.getfixturevalue("emulated_library")
    if level not in library.levels:
        pytest.skip(f"this processor has no {level}")
    made = Natives(library, level)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _one_thread(one_torch_thread: None) -> None:
    """Those about threads set their own number."""
