"""`kvd profile` against servers whose answers are known, and real ones: what is sent, seen, said and refused."""

from __future__ import annotations

import io
import json
import re
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd import cli
from kvd.core import BLOCK_SIZE
from tests.model.checkpoints import make_llama
from tests.tools.bench_fakes import FakeServer, kvd_info, serving

CALIBRATION = 2  # requests that come before every profile
SMALL = ("--runs", "1", "--tokens", "4")
NO_BYTES = json.dumps(
    {
        "kind": "kvd profile", "format": 1, "machine": "", "num_tokens": 1, "started": "",
        "sides": [
            {"label": "", "settings": {}, "lengths": [{"length": 1, "memory": {"num_bytes": 0}, "runs": []}]}
        ],
    }
)  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("KVD_API_KEY", "KVD_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer(owned_by="kvd", has_snapshots=True, reports_cache=True)
    with serving(server):
        yield server


def profiled(tmp_path: Path, *words: str, name: str = "result.json") -> dict[str, Any]:
    """What --json holds after a profile that went well."""
    path = tmp_path / name
    assert cli.main(["profile", *words, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert isinstance(result, dict)
    return result


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and the one line of a profile that went wrong."""
    capsys.readouterr()
    code = cli.main(["profile", *words])
    (line,) = capsys.readouterr().err.splitlines()
    return code, line


# --------------------------------------------------------------------------- what is sent and seen


def test_each_run_is_a_new_prompt_and_its_prefix_again(fake: FakeServer, tmp_path: Path) -> None:
    result = profiled(tmp_path, fake.url, "--lengths", "128,400", "--runs", "2", "--tokens", "8")
    bodies = fake.bodies[CALIBRATION:]
    assert [body["max_tokens"] for body in bodies] == [8, 1] * 6
    assert fake.most_running == 1
    assert len({body["prompt"] for body in bodies}) == len(bodies)
    (side,) = result["sides"]
    assert [length["length"] for length in side["lengths"]] == [128, 400]
    for length in side["lengths"]:
        assert [(run["run"], run["counted"]) for run in length["runs"]] == [(0, False), (1, True), (2, True)]
        for run in length["runs"]:
            total = run["cold"]["prompt_tokens"] + run["cold"]["completion_tokens"]
            assert abs(total - length["length"]) <= fake.tokens_per_word
            assert run["cold"]["cached_tokens"] < BLOCK_SIZE
            question = run["warm"]["prompt_tokens"] - run["warm"]["cached_tokens"]
            assert 0 < question < 2 * 32


def test_figures_are_those_of_the_arrivals(fake: FakeServer, tmp_path: Path) -> None:
    result = profiled(tmp_path, fake.url, "--lengths", "128", "--runs", "3", "--tokens", "8")
    (length,) = result["sides"][0]["lengths"]
    values: dict[str, list[float]] = {"cold": [], "warm": [], "itl": []}
    for run in length["runs"][1:]:
        cold, warm = run["cold"], run["warm"]
        values["cold"].append(1000 * (cold["arrivals"][0] - cold["sent"]))
        values["warm"].append(1000 * (warm["arrivals"][0] - warm["sent"]))
        values["itl"].append(1000 * (cold["last"] - cold["arrivals"][0]) / 7)
    for name, expected in values.items():
        assert [run["values"][name] for run in length["runs"][1:]] == pytest.approx(expected, abs=0.01)
        assert length["summary"][name]["median"] == pytest.approx(statistics.median(expected), abs=0.01)
        assert length["summary"][name]["num_runs"] == 3


def test_bytes_are_those_of_the_blocks_that_were_active(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = profiled(tmp_path, fake.url, "--lengths", "160,320", *SMALL)
    (side,) = result["sides"]
    for length in side["lengths"]:
        memory = length["memory"]
        cold = length["runs"][0]["cold"]
        assert memory["num_tokens"] == cold["prompt_tokens"] + cold["completion_tokens"]
        assert memory["num_blocks"] == -(-memory["num_tokens"] // BLOCK_SIZE)
        assert memory["num_bytes"] == memory["num_blocks"] * BLOCK_SIZE * 100
        assert memory["num_others"] == 0
    few, many = (length["memory"] for length in side["lengths"])
    slope = (many["num_bytes"] - few["num_bytes"]) / (many["num_tokens"] - few["num_tokens"])
    assert side["slopes"]["kv"]["slope"] == pytest.approx(slope)
    text = capsys.readouterr().out
    predicted = few["num_tokens"] * 100
    row = f"160 {few['num_tokens']} {few['num_blocks']} {few['num_bytes'] / 2**20:.2f} {predicted / 2**20:.2f} "
    assert row + f"{few['num_bytes'] / predicted - 1:+.1%}" in [" ".join(line.split()) for line in text.splitlines()]


def test_blocks_of_others_are_not_counted_and_said(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.num_blocks_of_others = 7
    result = profiled(tmp_path, fake.url, "--lengths", "160", *SMALL)
    (length,) = result["sides"][0]["lengths"]
    assert length["memory"]["num_blocks"] == 10
    assert length["memory"]["num_others"] == 1
    assert "160: 1 other requests ran, so the blocks are not of one request alone" in capsys.readouterr().out
    assert result["sides"][0]["slopes"]["kv"] is None


def test_what_does_not_fit_is_left_out_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeServer(owned_by="kvd", has_snapshots=True, context=256)
    with serving(fake):
        result = profiled(tmp_path, fake.url, "--lengths", "128,256,257", *SMALL)
    assert "257: left out: the context holds 256 tokens" in capsys.readouterr().out.splitlines()
    measured, whole, left_out = result["sides"][0]["lengths"]
    assert measured["skipped"] is whole["skipped"] is None
    assert (left_out["skipped"], left_out["runs"]) == ("the context holds 256 tokens", [])
    assert len(fake.bodies) == CALIBRATION + 2 * 2 * 2


def test_another_server_has_latencies_and_no_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeServer()
    with serving(fake):
        result = profiled(tmp_path, fake.url, "--lengths", "128,256", *SMALL)
    out = capsys.readouterr().out
    assert "this server is no kvd, so its KV cache cannot be seen" in out
    assert "KV cache of one request" not in out
    assert all(length["memory"] is None for length in result["sides"][0]["lengths"])
    assert result["sides"][0]["slopes"]["cold"]["num_points"] == 2


def test_the_key_is_sent_and_not_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeServer(api_key="hush")
    with serving(fake):
        result = profiled(tmp_path, fake.url, "--key", "hush", "--lengths", "128", *SMALL)
        assert refused(capsys, fake.url, "--key", "wrong")[0] == 1
    assert "hush" not in json.dumps(result)
    assert "(hidden)" in result["command"]


# --------------------------------------------------------------------------- table and picture


@pytest.mark.parametrize("software", ["kvd", "somebody"])
def test_the_table_can_be_read_at_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str], software: str) -> None:
    name = "a-model-whose-name-is-so-long-that-it-alone-would-fill-most-of-a-line"
    fake = FakeServer(name, owned_by=software, has_snapshots=software == "kvd")
    with serving(fake):
        first = tmp_path / "first.json"
        profiled(tmp_path, fake.url, "--lengths", "128,256,9000", *SMALL, name="first.json")
        profiled(tmp_path, fake.url, "--lengths", "128,256,9000", *SMALL, "--compare", str(first))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert {"latency", "each token more (least squares)"} <= set(lines)


def test_the_picture_needs_nothing_from_elsewhere(fake: FakeServer, tmp_path: Path) -> None:
    target = tmp_path / "picture.svg"
    profiled(tmp_path, fake.url, "--lengths", "128,256", "--runs", "2", "--tokens", "4", "--picture", str(target))
    text = target.read_text()
    root = ElementTree.fromstring(text)
    words = {element.text for element in root.iter() if element.text}
    assert {"kvd profile", "KV cache of one request", "TTFT cold", "TTFT warm", "ITL"} <= words
    assert "100 bytes per token" in words
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == 2 + 3 * 2 * 2, "blocks of two lengths, and three latencies of two runs of each"
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    assert all(0 < float(circle.attrib["cx"]) < width and 0 < float(circle.attrib["cy"]) < height for circle in circles)
    assert re.findall(r"https?://[^\"<]+", text.replace(fake.url, "")) == ["http://www.w3.org/2000/svg"]


def test_json_on_stdout_leaves_it_alone(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", fake.url, "--lengths", "128", *SMALL, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["kind"] == "kvd profile"
    assert "kvd profile" in err


# --------------------------------------------------------------------------- comparing


def with_values(result: dict[str, Any], values: dict[str, list[float]]) -> str:
    """The result as JSON, with these values of its counted runs, in turn."""
    for side in result["sides"]:
        for length in side["lengths"]:
            for run in length["runs"][1:]:
                run["values"] = {name: each[run["run"] - 1] for name, each in values.items()}
    return json.dumps(result)


def test_a_change_is_told_with_its_ratio_its_noise_and_its_settings(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (fake.url, "--lengths", "160", "--runs", "5", "--tokens", "4")
    old = tmp_path / "old.json"
    # Far from anything that this fake can be measured at: one slower than any, one faster, one that holds all others.
    slow, fast, wide = ([factor * each for each in (1, 1, 1, 1.1, 0.9)] for factor in (1e6, 1e-6, 1.0))
    wide[3:] = [1e6, 1e-6]
    old.write_text(with_values(profiled(tmp_path, *words), {"cold": slow, "warm": fast, "itl": wide}))
    fake.info = kvd_info("fp16", bytes_per_token=200.0, max_num_seqs=8, created=2)
    capsys.readouterr()
    result = profiled(tmp_path, *words, "--compare", str(old))
    rows = {row["label"]: row["difference"] for row in result["comparison"]["rows"]}
    assert {label: row["words"] for label, row in rows.items()} == {
        "KV MiB": "larger", "TTFT cold": "faster", "TTFT warm": "slower", "ITL": "no difference beyond noise",
    }  # fmt: skip
    assert rows["KV MiB"]["ratio"] == 2
    assert rows["TTFT cold"]["old"] == 1e6
    assert rows["TTFT cold"]["old_noise"] == pytest.approx(0.1)
    assert rows["TTFT cold"]["ratio"] == pytest.approx(rows["TTFT cold"]["new"] / 1e6)
    out = capsys.readouterr().out
    assert "no difference beyond noise" in out
    assert "±10%" in out
    assert {"kv_cache_dtype: int8 → fp16", "max_num_seqs: 16 → 8"} == set(result["comparison"]["changes"])


def test_a_single_run_says_nothing(fake: FakeServer, tmp_path: Path) -> None:
    words = (fake.url, "--lengths", "160", *SMALL)
    profiled(tmp_path, *words, name="old.json")
    result = profiled(tmp_path, *words, "--compare", str(tmp_path / "old.json"))
    latencies = [row["difference"] for row in result["comparison"]["rows"] if row["label"] != "KV MiB"]
    assert [difference["words"] for difference in latencies] == ["too few runs to tell"] * 3
    assert result["comparison"]["changes"] == []


def test_other_machines_lengths_and_answers_are_said(fake: FakeServer, tmp_path: Path) -> None:
    old = profiled(tmp_path, fake.url, "--lengths", "160", *SMALL)
    old["machine"] |= {"cpu": "another"}
    (tmp_path / "old.json").write_text(json.dumps(old))
    words = ("--lengths", "320", "--runs", "1", "--tokens", "5", "--compare", str(tmp_path / "old.json"))
    result = profiled(tmp_path, fake.url, *words)
    assert result["comparison"]["rows"] == []
    notes = " ".join(result["comparison"]["notes"])
    assert "another machine" in notes
    assert "answers had 4 tokens, now 5" in notes
    assert "no length was measured in both" in notes


# --------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--lengths", "10"), "--lengths: expected 1 to 16 numbers of tokens, the least 96"),
        (("--lengths", "a"), "--lengths"),
        (("--lengths", ""), "--lengths"),
        (("--lengths", ",".join(str(200 + each) for each in range(17))), "--lengths"),
        (("--tokens", "1"), "--tokens: expected a whole number from 2"),
        (("--runs", "0"), "--runs"),
        (("--runs", "x"), "--runs"),
        (("http://example.com",), "URL: example.com is not this machine; add --allow-remote"),
        (("example.com:80",), "URL: example.com is not this machine"),
        (("ftp://127.0.0.1",), "URL: expected http://HOST:PORT"),
        (("http://127.0.0.1:1", "--max-model-len", "5"), "--max-model-len: unknown here; with a URL"),
        (("http://127.0.0.1:1", "--kv-cache-dtype", "int8"), "--kv-cache-dtype: unknown here; with a URL"),
        (("--kv-cache-dtype", "int8,int8"), "--kv-cache-dtype: expected different names"),
        (("--kv-cache-dtype", "int8,int3"), "int3"),
        (("--max-modle-len", "5"), "max-model-len"),
        (("--json", "/no/such/folder/x.json"), "--json: /no/such/folder/x.json: its folder does not exist"),
        (("--picture", "/no/such/folder/x.svg"), "--picture"),
        (("--picture", "x.png"), "--picture: expected a file that ends in .svg, got 'x.png'"),
        (("--compare", "/no/such/file"), "--compare: /no/such/file: No such file or directory"),
    ],
)
def test_a_bad_flag_is_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    code, line = refused(capsys, *words)
    assert code == 2
    assert message in line


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "kvd bench", "format": 1}', '{"kind": "kvd profile", "format": 999}',
             '{"kind": "kvd profile", "format": 1, "sides": 3}', "[" * 100_000,
             '{"kind": "kvd profile", "format": 1, "machine": NaN, "num_tokens": 1, "sides": [], "started": ""}',
             NO_BYTES],
)  # fmt: skip
def test_what_is_no_profile_is_refused_before_anything_is_measured(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    code, line = refused(capsys, fake.url, "--compare", str(path))
    assert code == 2
    assert f"--compare: {path}" in line
    assert fake.bodies == []


def test_a_terminal_without_utf_8_gets_something_too(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr("sys.stdout", stdout)
    assert cli.main(["profile", fake.url, "--lengths", "128,256", "--runs", "2"]) == 0
    assert b"?s" in stdout.buffer.getvalue()


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, line = refused(capsys, "http://127.0.0.1:9")
    assert code == 1
    assert "nothing answers there" in line


def test_a_server_that_does_not_start_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = refused(capsys, str(tmp_path / "no-model"), *SMALL)
    assert code == 1
    assert "kvd serve did not start" in line


# --------------------------------------------------------------------------- real servers


def test_one_kv_format_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a tiny model, by servers of our own, side by side."""
    model = make_llama(tmp_path / "model", max_position_embeddings=2048)
    words = ("--kv-cache-dtype", "int8,fp16", "--lengths", "128,256", "--runs", "1", "--tokens", "32")
    small = ("--kv-cache-memory-bytes", "16MiB", "--max-num-seqs", "4")
    result = profiled(tmp_path, str(model), *words, *small, "--api-key", "hush")
    assert [side["label"] for side in result["sides"]] == ["int8", "fp16"]
    text = capsys.readouterr().out
    rows = [line.split()[:2] for line in text.split("latency")[1].splitlines() if re.match(r"\d+ ", line)]
    assert rows == [["128", "int8"], ["128", "fp16"], ["256", "int8"], ["256", "fp16"]]
    assert "hush" not in text + json.dumps(result)
    of_int8, of_fp16 = (side["settings"]["budget"]["bytes_per_token"] for side in result["sides"])
    assert of_int8 < of_fp16


def test_the_default_model(
    tmp_path: Path, kvd_home: Path, default_model_files: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVD_HOME", str(kvd_home))
    words = ("--lengths", "128,256", "--runs", "1", "--tokens", "48", "--kv-cache-memory-bytes", "64MiB")
    result = profiled(tmp_path, "smollm2-135m-instruct", *words)
    (side,) = result["sides"]
    for length in side["lengths"]:
        memory = length["memory"]
        predicted = memory["num_tokens"] * side["settings"]["budget"]["bytes_per_token"]
        block = side["settings"]["budget"]["block_bytes"]
        # The last look may come before the last tokens: the engine publishes its numbers at intervals.
        assert predicted - 4 * block < memory["num_bytes"] < predicted + block
        for run in length["runs"]:
            assert run["cold"]["completion_tokens"] == 48
            assert run["warm"]["cached_tokens"] > 32
    assert side["slopes"]["kv"]["slope"] > 0
