"""The default model's decoder, packed once for all engine tests."""

from __future__ import annotations

import pytest

from kvd.model.decoder import Decoder
from kvd.model.files import ModelFiles


@pytest.fixture(scope="session")
def default_decoder(default_model_files: ModelFiles) -> Decoder:
    """The default model with its default KV format; steps of up to 512 tokens and 16 sequences."""
    from kvd.model.loading import load_weights, read_spec
    from kvd.model.progress import QuietProgress
    from kvd_kernels.registry import create_ops

    spec = read_spec(default_model_files)
    weights = load_weights(default_model_files, spec, progress=QuietProgress())
    return Decoder(
        weights,
        create_ops("cpu"),
        spec.kv_format("auto"),
        max_tokens=512,
        max_seqs=16,
        max_positions=2048,
        progress=QuietProgress(),
    )


@pytest.fixture(scope="session")
def default_tokenizer(default_model_files: ModelFiles):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(default_model_files.tokenizer_json))
