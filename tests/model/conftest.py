"""Fixtures of the model room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvd.model.files import ModelFiles
from kvd.model.loading import load_weights, read_spec, resolve_model
from kvd.model.progress import QuietProgress
from kvd.model.weights import ModelWeights

Load = Callable[..., tuple[ModelFiles, ModelWeights]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors spend their time waiting for threads to meet, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def load(home: Path) -> Load:
    """Resolve and load a local model: load(path, head_int8=False)."""

    def run(path: Path, *, head_int8: bool = False) -> tuple[ModelFiles, ModelWeights]:
        files = resolve_model(str(path), home=home, revision=None, progress=QuietProgress())
        spec = read_spec(files)
        return files, load_weights(files, spec, progress=QuietProgress(), head_int8=head_int8)

    return run
