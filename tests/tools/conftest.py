"""Fixtures of the tools' tests: a home for prepared models, a small text, the default model's weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.model.files import ModelFiles
from kvd.model.loading import load_weights, read_spec, resolve_model
from kvd.model.progress import QuietProgress
from kvd.model.weights import ModelWeights


def load(path: Path, home: Path, *, head_int8: bool = True) -> tuple[ModelFiles, ModelWeights]:
    """A checkpoint directory as kvd loads it."""
    files = resolve_model(str(path), home=home, revision=None, progress=QuietProgress())
    return files, load_weights(files, read_spec(files), progress=QuietProgress(), head_int8=head_int8)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture(scope="session")
def default_weights(default_model_files: ModelFiles) -> ModelWeights:
    return load_weights(default_model_files, read_spec(default_model_files), progress=QuietProgress())
