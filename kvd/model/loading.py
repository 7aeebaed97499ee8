"""From the `model` string to weights in memory: the three functions that the rest of kvd calls.

Purpose: dispatch between formats, and keep what start-up had to prepare.
Owner thread: the one that starts the engine. Only `load_weights` needs torch.
Invariant: a prepared folder belongs to the content of its file (size and sha256), is complete under its final
name, and can be deleted at any time.

Layout under `home`:
    models/NAME/           catalogue models
    hub/ORG--NAME/COMMIT/  hub models
    prepared/KEY/          of a GGUF file: tokenizer.json and contents.json (config, tensor table)
    prepared/identity/     sha256 of local files by path, size and modification time
"""

from __future__ import annotations

import difflib
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvd.errors import CheckpointError, ModelNotFound
from kvd.model import catalogue, hub
from kvd.model.awq_config import read_awq_config
from kvd.model.config_reader import read_architecture, read_bias_use, read_model_spec
from kvd.model.files import ModelFiles
from kvd.model.gguf_reader import GgufTensor, parse_gguf, translate_config
from kvd.model.gguf_tokenizer import adds_bos, build_tokenizer_json
from kvd.model.hf_reader import dump_config, float_label, read_hf_directory
from kvd.model.progress import Progress
from kvd.model.shards import find_shards
from kvd.model.spec import ModelSpec
from kvd.model.storage import locked, read_json_object, write_atomically

if TYPE_CHECKING:
    from kvd.model.weights import ModelWeights

PREPARED_VERSION = 1
CONTENTS_NAME = "contents.json"
HASH_BYTES = 1 << 22
SPECIAL_ROLES = (
    ("bos_token", "bos"),
    ("eos_token", "eos"),
    ("unk_token", "unknown"),
    ("pad_token", "padding"),
)


def resolve_model(model: str, *, home: Path, revision: str | None, progress: Progress) -> ModelFiles:
    """Find a model, downloading it when it is a catalogue name or a hub id.

    model: a directory, a *.gguf file, a catalogue name or org/name; a path that exists wins over a hub id.
    Raises ModelNotFound, DownloadError, CheckpointError, UnsupportedModel or StartupError, each one line.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _resolve_directory(path, model, home, progress)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{model}: a model is a directory or a .gguf file")
        return _resolve_gguf(path, model, home, progress)
    if model in catalogue.CATALOGUE:
        return _resolve_gguf(catalogue.fetch(catalogue.CATALOGUE[model], home, progress), model, home, progress)
    if hub.HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        directory = hub.fetch(model, home=home, revision=revision, progress=progress, check_config=_check_config)
        return _resolve_directory(directory, model, home, progress)
    if "/" in model or path.suffix == ".gguf":
        raise ModelNotFound(f"{model}: no such file or directory")
    close = difflib.get_close_matches(model.lower(), list(catalogue.CATALOGUE), n=1)
    nearest = f"did you mean {close[0]!r}?" if close else f"the catalogue has {', '.join(catalogue.CATALOGUE)}"
    raise ModelNotFound(f"model {model!r}: neither a path, nor org/name, nor in the catalogue; {nearest}")


def read_spec(files: ModelFiles) -> ModelSpec:
    """The shape of a resolved model. Raises CheckpointError or UnsupportedModel naming file and key."""
    source = str(files.directory / "config.json") if files.format == "hf" else str(files.weights[0])
    if files.format == "gguf":
        quantization = f"gguf {files.config['quantization_config']['type']}"
    else:
        read_architecture(files.config, source)  # an unknown architecture is the better message
        awq = read_awq_config(files.config, source, files.directory)
        quantization = awq.label if awq is not None else float_label(files.config)
    return read_model_spec(
        files.config,
        source=source,
        quantization=quantization,
        bos_token_id=files.bos_token_id,
        eos_token_ids=files.eos_token_ids,
    )


def load_weights(files: ModelFiles, spec: ModelSpec, *, progress: Progress, head_int8: bool = True) -> ModelWeights:
    """Read, check and convert every weight of a resolved model.

    head_int8: an embedding or head that the checkpoint leaves in 16 or 32 bits is rounded to int8 per group
    (128, 64 or 32 input channels); with tied embeddings once, for both. Other float layers stay as they are, as
    views of the checkpoint's file until a backend packs them.

    The fingerprint covers the config, `head_int8`, and for GGUF the sha256 of the whole file; for safetensors
    every tensor's name, type, shape and three samples of 4 KiB of its content.
    """
    from kvd.model.assemble import assemble

    digest = hashlib.sha256(f"kvd weights 1|{head_int8}|".encode())
    digest.update(dump_config(files.config))
    source_name = str(files.directory / "config.json") if files.format == "hf" else str(files.weights[0])
    biases = read_bias_use(files.config, source_name)
    if files.format == "gguf":
        from kvd.model.gguf_weights import GgufWeightSource

        contents = read_json_object(files.directory / CONTENTS_NAME)
        digest.update(contents["sha256"].encode())
        tensors = tensors_of(contents)
        permuted = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}
        source: Any = GgufWeightSource(files.weights[0], tensors, permuted if spec.architecture == "llama" else {})
    else:
        from kvd.model.hf_weights import HfWeightSource
        from kvd.model.safetensors_files import SafetensorsFiles

        shards = SafetensorsFiles(files.weights)
        shards.update_digest(digest)
        source = HfWeightSource(
            shards,
            read_awq_config(files.config, source_name, files.directory),
            tied_embeddings=spec.tied_embeddings,
            config_source=source_name,
        )
    return assemble(source, spec, biases, fingerprint=digest.hexdigest(), head_int8=head_int8, progress=progress)


def _resolve_directory(directory: Path, model: str, home: Path, progress: Progress) -> ModelFiles:
    """A Hugging Face checkpoint, or a folder that holds one GGUF file."""
    if not (directory / "config.json").is_file():
        ggufs = sorted(directory.glob("*.gguf"))
        if len(ggufs) == 1:
            return _resolve_gguf(ggufs[0], model, home, progress)
        if ggufs:
            names = ", ".join(path.name for path in ggufs)
            raise ModelNotFound(f"{directory}: several GGUF files ({names}); set model to one of them")
    # What kvd does not serve is said before anything is said about files.
    _check_config(directory)
    return read_hf_directory(directory, model, find_shards(directory))


def _check_config(directory: Path) -> None:
    """Refuse an architecture or a quantisation method by name."""
    path = directory / "config.json"
    config = read_json_object(path)
    read_architecture(config, str(path))
    read_awq_config(config, str(path), directory)


def _resolve_gguf(path: Path, model: str, home: Path, progress: Progress) -> ModelFiles:
    path = path.absolute()
    sha256 = _content_hash(path, home, progress)
    folder = home / "prepared" / f"{sha256[:32]}-v{PREPARED_VERSION}"
    contents_path, tokenizer_json = folder / CONTENTS_NAME, folder / "tokenizer.json"
    if not (contents_path.is_file() and tokenizer_json.is_file()):
        with locked(home / "prepared" / ".lock"):
            if not contents_path.is_file():
                _prepare_gguf(path, sha256, folder, progress)
    contents = read_json_object(contents_path)
    config = contents["config"]
    return ModelFiles(
        name=model,
        format="gguf",
        directory=folder,
        weights=(path,),
        config=config,
        tokenizer_json=tokenizer_json,
        chat_template=contents["chat_template"],
        adds_bos=contents["adds_bos"],
        bos_token_id=config["bos_token_id"],
        eos_token_ids=tuple(contents["eos_token_ids"]),
        special_tokens=contents["special_tokens"],
    )


def _prepare_gguf(path: Path, sha256: str, folder: Path, progress: Progress) -> None:
    """Write what parsing yields; contents.json last, since its presence says that the folder is complete."""
    with progress.task(f"Preparing {path.name}", 3, "steps") as task:
        parsed = parse_gguf(path)
        task.advance(1)
        metadata, prefix = parsed.metadata, "tokenizer.ggml."
        config = translate_config(parsed, str(path))
        tokenizer = build_tokenizer_json(metadata, str(path))
        task.advance(1)
        tokens = metadata[f"{prefix}tokens"]
        special = {}
        for role, key in SPECIAL_ROLES:
            token_id = metadata.get(f"{prefix}{key}_token_id")
            if token_id is not None:
                if not 0 <= token_id < len(tokens):
                    raise CheckpointError(f"{path}: {prefix}{key}_token_id {token_id} is no token")
                special[role] = tokens[token_id]
        ends = [metadata.get(f"{prefix}{key}_token_id") for key in ("eos", "eot", "eom")]
        chat_template = metadata.get("tokenizer.chat_template")
        contents = {
            "sha256": sha256,
            "config": config,
            "chat_template": chat_template if isinstance(chat_template, str) else None,
            "adds_bos": "bos_token" in special and adds_bos(metadata),
            "eos_token_ids": list(dict.fromkeys(end for end in ends if end is not None)),
            "special_tokens": special,
            "tensors": {name: list(asdict(tensor).values()) for name, tensor in parsed.tensors.items()},
        }
        write_atomically(folder / "tokenizer.json", tokenizer)
        write_atomically(folder / CONTENTS_NAME, json.dumps(contents).encode())
        task.advance(1)


def kept_contents(path: Path, home: Path) -> dict[str, Any] | None:
    """What parsing a GGUF file yielded when it was served before, unless it has changed since; None otherwise."""
    path = path.absolute()
    sha256 = _known_hash(path, home)
    contents = home / "prepared" / f"{(sha256 or '')[:32]}-v{PREPARED_VERSION}" / CONTENTS_NAME
    return read_json_object(contents) if sha256 is not None and contents.is_file() else None


def tensors_of(contents: dict[str, Any]) -> dict[str, GgufTensor]:
    """The table of tensors of a contents.json."""
    return {name: GgufTensor(kind, tuple(shape), offset) for name, (kind, shape, offset) in contents["tensors"].items()}


def _identity(path: Path, home: Path) -> tuple[list[Any], Path]:
    """What a file is recognised by without reading it, and where its sha256 is kept."""
    stat = path.stat()
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns], home / "prepared" / "identity" / f"{name}.json"


def _known_hash(path: Path, home: Path) -> str | None:
    key, record = _identity(path, home)
    known = read_json_object(record) if record.is_file() else {}
    return str(known["sha256"]) if known.get("key") == key and isinstance(known.get("sha256"), str) else None


def _content_hash(path: Path, home: Path, progress: Progress) -> str:
    """sha256 of a file, remembered by path, size and modification time."""
    known = _known_hash(path, home)
    if known is not None:
        return known
    key, record = _identity(path, home)
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file, progress.task(f"Checking {path.name}", key[1], "B") as task:
            while chunk := file.read(HASH_BYTES):
                digest.update(chunk)
                task.advance(len(chunk))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    write_atomically(record, json.dumps({"key": key, "sha256": digest.hexdigest()}).encode())
    return digest.hexdigest()
