"""Random checkpoints that are small enough to be computed hundreds of times."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvd.model.decoder import Decoder
from kvd.model.loading import load_weights, read_spec, resolve_model
from kvd.model.progress import QuietProgress
from kvd_kernels.registry import create_ops
from tests.model.checkpoints import make_llama

MAX_POSITIONS = 2048


def small_decoder(
    folder: Path,
    backend: str = "cpu",
    kv_cache_dtype: str = "int8",
    *,
    make: Callable[..., Path] = make_llama,
    **config: Any,
) -> Decoder:
    """A random model of two layers; steps of up to 512 tokens and 16 sequences."""
    path = make(folder / "model", max_position_embeddings=MAX_POSITIONS, **config)
    files = resolve_model(str(path), home=folder / "home", revision=None, progress=QuietProgress())
    spec = read_spec(files)
    return Decoder(
        load_weights(files, spec, progress=QuietProgress()),
        create_ops(backend),
        spec.kv_format(kv_cache_dtype),
        max_tokens=512,
        max_seqs=16,
        max_positions=MAX_POSITIONS,
        progress=QuietProgress(),
    )


def random_tokens(seed: int, count: int) -> list[int]:
    """Token ids that every checkpoint of `tests.model.checkpoints` knows, without its special ones."""
    return random.Random(seed).choices(range(3, 320), k=count)
