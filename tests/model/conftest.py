"""Fixtures of the model room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.model.files import ModelFiles
from kvd.model.loading import load_weights, read_spec, resolve_model
from kvd.model.progress import QuietProgress
from kvd.model.weights import ModelWeights

Load = Callable[..., tuple[ModelFiles, ModelWeights]]


@pytest.fixture(autouse=True)
def _one_thread(one_torch_thread: None) -> None:
    """In every test of this room."""


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
