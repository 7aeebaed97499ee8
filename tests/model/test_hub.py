"""The hub download against a hub on loopback that is slow, cut off, closed, gated or gone."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.errors import DownloadError, ModelNotFound, StartupError, UnsupportedModel
from kvd.model import hub
from kvd.model.files import ModelFiles
from kvd.model.loading import load_weights, read_spec, resolve_model
from kvd.model.progress import Progress, QuietProgress, TerminalProgress
from tests.model.checkpoints import make_llama
from tests.model.fake_hub import COMMIT, REPO, FakeHub

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = make_llama(tmp_path_factory.mktemp("hub") / "model", shards=2)
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture
def server(checkpoint: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    extra = {"README.md": b"read me", "pytorch_model.bin": b"pickle", "original/params.json": b"{}"}
    with FakeHub(checkpoint | extra) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(hub, "HubOptions", lambda: PATIENCE)
        yield running


PATIENCE = hub.HubOptions(timeout_seconds=20.0, retry_seconds=0.0)
IMPATIENCE = hub.HubOptions(timeout_seconds=0.05, retry_seconds=0.0)


def resolve(home: Path, progress: Progress | None = None, revision: str | None = None) -> ModelFiles:
    return resolve_model(REPO, home=home, revision=revision, progress=progress or QuietProgress())


def test_download_load_and_find_again(server: FakeHub, home: Path) -> None:
    stream = io.StringIO()
    files = resolve(home, TerminalProgress(stream))
    assert files.directory == home / "hub" / "org--tiny" / COMMIT
    names = {path.name for path in files.directory.iterdir()}
    assert SHARD in names
    assert not names & {"README.md", "pytorch_model.bin", "params.json"}
    assert f"Downloading {REPO}: 100% of" in stream.getvalue()
    load_weights(files, read_spec(files), progress=QuietProgress())
    assert len(server.downloads(SHARD)) == 1
    assert resolve(home) == files
    assert len(server.downloads(SHARD)) == 1
    assert server.requests[-1][0].startswith("/api/models/")


def test_a_commit_that_lies_here_needs_no_network(server: FakeHub, home: Path) -> None:
    files = resolve(home)
    seen = len(server.requests)
    assert resolve(home, revision=COMMIT).directory == files.directory
    assert len(server.requests) == seen


def test_offline_uses_what_is_here_and_names_what_is_not(
    server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match=f"{REPO}: not under .*HF_HUB_OFFLINE"):
        resolve(home)
    assert server.requests == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    files = resolve(home)
    seen = len(server.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve(home) == files
    assert len(server.requests) == seen


def test_a_hub_that_is_away_does_not_stop_a_complete_copy(
    server: FakeHub, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = resolve(home)
    server.status = 503
    assert resolve(home) == files
    assert "the hub answered 503; serving the copy" in caplog.text


def test_a_cut_connection_is_resumed_where_it_broke(server: FakeHub, home: Path) -> None:
    server.cuts = 2
    stream = io.StringIO()
    files = resolve(home, TerminalProgress(stream))
    ranges = server.downloads("model-00001-of-00002.safetensors") + server.downloads(SHARD)
    assert sum(header is not None for header in ranges) == 2
    assert "100% of" in stream.getvalue()
    load_weights(files, read_spec(files), progress=QuietProgress())


def test_a_connection_that_always_breaks_is_given_up_and_resumed_by_the_next_start(server: FakeHub, home: Path) -> None:
    server.cuts = -1
    with pytest.raises(DownloadError, match=r"safetensors: the connection to http.* failed .*start again"):
        resolve(home)
    assert not (home / "hub" / "org--tiny" / COMMIT / hub.COMPLETE).exists()
    server.cuts = 0
    part = home / "hub" / "org--tiny" / COMMIT / f".{SHARD}.part"
    part.write_bytes(server.files[SHARD][:1000])
    resolve(home)
    assert server.downloads(SHARD)[-1] == "bytes=1000-"


def test_a_server_that_ignores_ranges_starts_over(server: FakeHub, home: Path) -> None:
    server.cuts = 1
    server.ignore_range = True
    files = resolve(home)
    assert (files.directory / SHARD).read_bytes() == server.files[SHARD]


def test_bytes_that_do_not_match_the_hub_are_not_kept(server: FakeHub, home: Path) -> None:
    part = home / "hub" / "org--tiny" / COMMIT / f".{SHARD}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 1000)
    with pytest.raises(DownloadError, match=f"{SHARD} does not match the hub's checksum"):
        resolve(home)
    assert not part.exists()
    resolve(home)


def test_a_stalled_server_times_out(server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HubOptions", lambda: IMPATIENCE)
    server.stall_seconds = 0.5
    with pytest.raises(DownloadError, match=r"http.* did not answer in time; start again to resume"):
        resolve(home)


def test_nobody_listens(home: Path, server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=f"{REPO}: the connection to http://127.0.0.1:9 failed"):
        resolve(home)


@pytest.mark.parametrize(
    ("status", "code", "error", "words"),
    [
        (404, "RepoNotFound", ModelNotFound, "the hub has no such model"),
        (404, "RevisionNotFound", ModelNotFound, "the hub has no revision 'main'"),
        (401, "RepoNotFound", ModelNotFound, "the hub answered 401: no such model, or no access"),
        (401, "", ModelNotFound, "the hub answered 401"),
        (403, "GatedRepo", DownloadError, "gated; accept its terms on the hub (set HF_TOKEN)"),
        (500, "", DownloadError, "the hub answered 500"),
        (418, "", DownloadError, "the hub answered 418"),
    ],
)
def test_refusals_are_one_line(
    server: FakeHub, home: Path, status: int, code: str, error: type[StartupError], words: str
) -> None:
    server.status, server.code = status, code
    with pytest.raises(error) as caught:
        resolve(home)
    assert words in str(caught.value)
    assert str(caught.value).startswith(REPO)
    assert "\n" not in str(caught.value)


def test_a_gated_model_opens_with_the_token(server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.token = "hf_secret"
    with pytest.raises(DownloadError, match=r"gated.*set HF_TOKEN"):
        resolve(home)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(DownloadError, match=r"gated.*HF_TOKEN has no access yet") as caught:
        resolve(home)
    assert "hf_wrong" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    resolve(home)


def test_a_repository_of_pickles_is_refused_with_the_reason(server: FakeHub, home: Path) -> None:
    for name in [name for name in server.files if ".safetensors" in name]:
        del server.files[name]
    with pytest.raises(UnsupportedModel, match=r"pickled \(pytorch_model\.bin\)"):
        resolve(home)
    del server.files["pytorch_model.bin"]
    server.files["model.Q4_0.gguf"] = b""
    with pytest.raises(UnsupportedModel, match=r"no safetensors files; download its \.gguf file"):
        resolve(home)


def test_a_model_that_kvd_refuses_is_found_out_before_its_weights(server: FakeHub, home: Path) -> None:
    server.files["config.json"] = b'{"architectures": ["OtherForCausalLM"]}'
    with pytest.raises(UnsupportedModel, match="OtherForCausalLM"):
        resolve(home)
    assert server.downloads(SHARD) == []


def test_a_disk_that_is_too_small_is_said_before_the_download(
    server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 1000))
    with pytest.raises(StartupError, match=r"org/tiny needs .* more, the disk has 1\.0 KB free"):
        resolve(home)
    assert server.downloads("config.json") == []


def test_no_telemetry_and_a_plain_client_name(server: FakeHub, home: Path) -> None:
    import os

    resolve(home)
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert all(path.startswith(("/api/models/org/tiny", "/org/tiny/resolve/")) for path, _ in server.requests)
