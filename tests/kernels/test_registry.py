"""Backends by name, imported only when asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvd_kernels.registry import BACKENDS, create_ops
from tests.kernels.conftest import make_ops


def test_every_backend_says_what_it_is() -> None:
    for name in BACKENDS:
        ops = make_ops(name)
        assert ops.name == name
        assert ops.arithmetic in ("a8", "a16")
        assert ops.arithmetic_id.startswith(ops.arithmetic)
    # One id per arithmetic: what one a8 backend wrote into a cache, another may read.
    assert create_ops("cpu").arithmetic_id == create_ops("reference").arithmetic_id
    assert create_ops("reference-a16").arithmetic_id != create_ops("reference").arithmetic_id


def test_an_unknown_backend_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match="unknown backend 'cuda'; known are: cpu, reference, reference-a16, triton"):
        create_ops("cuda")


@pytest.mark.parametrize(
    ("imported", "absent"),
    [("kvd_kernels.kv_format", ("torch", "kvd")), ("kvd_kernels.registry", ("kvd_kernels.reference", "kvd"))],
)
def test_imports_stay_small(imported: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {imported}; sys.exit(any(name in sys.modules for name in {absent!r}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
