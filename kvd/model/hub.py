"""Checkpoints from the Hugging Face hub: safetensors, JSON and tokenizer files, nothing else.

Purpose: `org/name` becomes a local directory. `huggingface_hub` speaks to the hub (addresses, token, errors);
the bytes are written here, because a half-finished file must survive the process that was fetching it.
Owner thread: the one that starts the engine.
Invariant: a file under its final name is complete, and matches the hub's sha256 where the hub states one. A
commit's folder counts as complete only with its marker. Nothing pickled is ever downloaded.

Honoured: HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN (and a token that was stored by logging in), proxies.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd.errors import DownloadError, ModelNotFound, StartupError, UnsupportedModel
from kvd.model.progress import Progress, Task, format_amount
from kvd.model.shards import SINGLE_NAME, refuse_pickles
from kvd.model.storage import (
    locked,
    make_folder,
    read_json_object,
    readable_os_error,
    write_atomically,
)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "LICENSE",
)
COMPLETE = ".complete"
MAX_ATTEMPTS = 5  # without a new byte
TRANSIENT_STATUSES = (429, 500, 502, 503, 504)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubOptions:
    """Patience. A stalled connection is given up after `timeout_seconds` and resumed a few times."""

    timeout_seconds: float = 20.0
    retry_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class _RemoteFile:
    name: str
    size: int
    sha256: str | None


def is_offline() -> bool:
    """HF_HUB_OFFLINE, read like huggingface_hub reads it, but at call time."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def fetch(
    repo_id: str,
    *,
    home: Path,
    revision: str | None,
    progress: Progress,
    check_config: Callable[[Path], None],
    options: HubOptions | None = None,
) -> Path:
    """The local directory of a hub checkpoint, downloaded or resumed as needed.

    check_config(directory): raises for a config.json that kvd does not serve, before weights are downloaded.
    Raises ModelNotFound for an unknown id or revision, DownloadError for everything that the hub or the network
    refuses, UnsupportedModel for a repository without safetensors, StartupError for a full disk.
    """
    options = options or HubOptions()
    wanted = revision or "main"
    repo_folder = home / "hub" / repo_id.replace("/", "--")
    kept = _find_kept(repo_folder, wanted)
    if kept is not None and (is_offline() or COMMIT.fullmatch(wanted)):
        return kept
    if is_offline():
        raise ModelNotFound(f"{repo_id}: not under {home / 'hub'}, and HF_HUB_OFFLINE forbids to download it")
    # Read by huggingface_hub when it is imported: no telemetry, and plain HTTP, which can be resumed.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    try:
        commit, files = _list_files(repo_id, wanted, options)
    except DownloadError as error:
        if kept is None:
            raise
        _log.warning("%s; serving the copy that was downloaded before", error)
        return kept
    with locked(home / "hub" / f".{repo_folder.name}.lock"):
        snapshot = make_folder(repo_folder / commit)
        if not (snapshot / COMPLETE).is_file():
            _download_all(repo_id, commit, files, snapshot, progress, check_config, options)
            write_atomically(snapshot / COMPLETE, json.dumps([file.name for file in files]).encode())
        write_atomically(repo_folder / "refs.json", json.dumps(_refs(repo_folder) | {wanted: commit}).encode())
    return snapshot


def _refs(repo_folder: Path) -> dict[str, Any]:
    path = repo_folder / "refs.json"
    return read_json_object(path) if path.is_file() else {}


def kept_copy(repo_id: str, *, home: Path, revision: str | None) -> Path | None:
    """Where a checkpoint was downloaded to before, complete; None where it was not. Touches no network."""
    return _find_kept(home / "hub" / repo_id.replace("/", "--"), revision or "main")


def _find_kept(repo_folder: Path, revision: str) -> Path | None:
    """The complete local copy of a revision, as of its last download."""
    commit = revision if COMMIT.fullmatch(revision) else _refs(repo_folder).get(revision)
    if isinstance(commit, str) and (repo_folder / commit / COMPLETE).is_file():
        return repo_folder / commit
    return None


def _list_files(repo_id: str, revision: str, options: HubOptions) -> tuple[str, list[_RemoteFile]]:
    """Commit and files to fetch."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP client

    try:
        info = HfApi(endpoint=_endpoint()).model_info(
            repo_id, revision=revision, files_metadata=True, timeout=options.timeout_seconds
        )
    except (HTTPError, OSError, ValueError) as error:
        raise _readable(error, repo_id, revision) from error
    files = [
        _RemoteFile(sibling.rfilename, sibling.size or 0, sibling.lfs.sha256 if sibling.lfs else None)
        for sibling in info.siblings or []
        if "/" not in sibling.rfilename
    ]
    names = [file.name for file in files]
    refuse_pickles(names, repo_id)
    if not any(name.endswith(".safetensors") for name in names):
        hint = (
            "; download its .gguf file and set model to the path"
            if any(name.endswith(".gguf") for name in names)
            else ""
        )
        raise UnsupportedModel(f"{repo_id}: the repository has no safetensors files{hint}")
    if info.sha is None or COMMIT.fullmatch(info.sha) is None:
        raise DownloadError(f"{repo_id}: the hub named no commit")
    return info.sha, [file for file in files if _is_wanted(file.name, names)]


def _is_wanted(name: str, names: list[str]) -> bool:
    if name.endswith(".safetensors"):
        # "consolidated" files repeat the same weights under another library's names.
        is_only = SINGLE_NAME not in names or name == SINGLE_NAME
        return is_only and not name.startswith("consolidated")
    return name in SMALL_FILES or name.endswith(".safetensors.index.json")


def _download_all(
    repo_id: str,
    commit: str,
    files: list[_RemoteFile],
    snapshot: Path,
    progress: Progress,
    check_config: Callable[[Path], None],
    options: HubOptions,
) -> None:
    """The config comes first, so that a model that kvd refuses is not found out after gigabytes."""
    missing = sum(file.size for file in files) - sum(
        _present_bytes(snapshot / part) for file in files for part in (file.name, _part_name(file.name))
    )
    free = shutil.disk_usage(snapshot).free
    if missing > free:
        raise StartupError(
            f"{snapshot}: {repo_id} needs {format_amount(missing, 'B')} more, the disk has "
            f"{format_amount(free, 'B')} free"
        )
    total = sum(file.size for file in files)
    with progress.task(f"Downloading {repo_id}", total, "B") as task:
        for file in sorted(files, key=lambda file: (file.name != "config.json", file.size, file.name)):
            _download(repo_id, commit, file, snapshot, task, options)
            if file.name == "config.json":
                check_config(snapshot)


def _part_name(name: str) -> str:
    return f".{name}.part"


def _present_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _download(repo_id: str, commit: str, file: _RemoteFile, snapshot: Path, task: Task, options: HubOptions) -> None:
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    final, part = snapshot / file.name, snapshot / _part_name(file.name)
    if final.is_file():
        task.advance(file.size)
        return
    task.advance(_present_bytes(part))
    attempts = 0
    while (before := _present_bytes(part)) < file.size or not part.is_file():
        try:
            _append(repo_id, commit, file, part, task, options)
        except HTTPError as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code not in TRANSIENT_STATUSES:
                raise _readable(error, repo_id, commit) from error
            attempts = 1 if _present_bytes(part) > before else attempts + 1
            if attempts >= MAX_ATTEMPTS:
                raise _readable(error, f"{repo_id}: {file.name}", commit) from error
            time.sleep(options.retry_seconds)
        except OSError as error:
            raise readable_os_error(error, part) from error
    if _present_bytes(part) > file.size or (file.sha256 is not None and _sha256(part) != file.sha256):
        part.unlink()
        raise DownloadError(f"{repo_id}: {file.name} does not match the hub's checksum; it was not kept")
    os.replace(part, final)


def _append(repo_id: str, commit: str, file: _RemoteFile, part: Path, task: Task, options: HubOptions) -> None:
    """One request for what is still missing of a file."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    have = _present_bytes(part)
    headers = build_hf_headers(library_name="kvd") | {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    url = hf_hub_url(repo_id, file.name, revision=commit, endpoint=_endpoint())
    with get_session().stream(
        "GET", url, headers=headers, timeout=options.timeout_seconds, follow_redirects=True
    ) as response:
        if response.status_code >= 400:
            response.read()
        hf_raise_for_status(response)
        if have and response.status_code != 206:  # the server starts from the beginning
            task.advance(-have)
            have = 0
        with part.open("ab" if have else "wb") as target:
            # As they arrive: whatever is still collected into larger chunks is lost when the connection breaks.
            for chunk in response.iter_bytes():
                target.write(chunk)
                task.advance(len(chunk))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def _readable(error: Exception, what: str, revision: str) -> StartupError:
    """One line for whatever huggingface_hub and its HTTP client raise."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        remedy = "HF_TOKEN has no access yet" if get_token() else "set HF_TOKEN"
        return DownloadError(f"{what}: the model is gated; accept its terms on the hub ({remedy})")
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFound(f"{what}: the hub has no revision {revision!r}")
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status in (401, 403):
        remedy = "HF_TOKEN is not accepted for it" if get_token() else "if it is private, set HF_TOKEN"
        return ModelNotFound(f"{what}: the hub answered {status}: no such model, or no access ({remedy})")
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return ModelNotFound(f"{what}: the hub has no such model")
    if status is not None:
        return DownloadError(f"{what}: the hub answered {status}")
    where = _endpoint() or "the hub"
    if "Timeout" in type(error).__name__:
        return DownloadError(f"{what}: {where} did not answer in time; start again to resume")
    reason = " ".join(str(error).split()) or type(error).__name__
    return DownloadError(f"{what}: the connection to {where} failed ({reason}); start again to resume")
