"""`kvd bench` against servers whose answers are known: what is sent, counted, alternated, reported and refused."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd import cli
from kvd.tools import bench_options
from kvd.tools.bench_run import GROUPS
from tests.model.checkpoints import make_llama
from tests.test_serve import Process
from tests.tools.bench_fakes import FakeServer, error, serving

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVD_HOME", str(tmp_path / "home"))
    for name in ("KVD_API_KEY", "KVD_API_KEY_AGAINST", "KVD_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    # A proxy that nobody answers at: loopback must not go through it.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    with serving(server):
        yield server


def measured(tmp_path: Path, *words: str) -> dict[str, Any]:
    """What --json holds after a benchmark that went well."""
    path = tmp_path / "result.json"
    assert cli.main(["bench", *words, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert isinstance(result, dict)
    return result


def load_of(result: dict[str, Any], name: str) -> dict[str, Any]:
    (load,) = [load for load in result["loads"] if load["name"] == name]
    return load


CALIBRATION = 2  # requests that come before every benchmark


# --------------------------------------------------------------------------- what is sent and counted


def test_a_single_stream_in_requests_tokens_and_runs(fake: FakeServer, tmp_path: Path) -> None:
    result = measured(tmp_path, "--url", fake.url, "--only", "single", "--runs", "3", "--tokens", "7")
    body = fake.bodies[-1]
    assert body["model"] == "fake-model"
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True
    assert body["temperature"] == 0
    assert "cache_prompt" not in body
    assert [body["max_tokens"] for body in fake.bodies[CALIBRATION:]] == [7] * 4
    load = load_of(result, "single")
    assert [(run["run"], run["counted"]) for run in load["runs"]] == [(0, False), (1, True), (2, True), (3, True)]
    for run in load["runs"]:
        (answer,) = run["answers"]
        assert answer["completion_tokens"] == answer["max_tokens"] == 7
        assert len(answer["arrivals"]) == 7
        assert 0 == answer["sent"] < answer["arrivals"][0] <= answer["last"]
        assert run["values"]["decode"] == pytest.approx(6 / (answer["last"] - answer["arrivals"][0]), rel=0.05)
    assert load["summary"]["A"]["decode"]["num_runs"] == 3
    assert len({body["prompt"] for body in fake.bodies}) == len(fake.bodies)


@pytest.mark.parametrize("tokens_per_word", [1, 2, 5])
def test_prompts_have_the_wanted_number_of_tokens_by_the_endpoints_own_count(
    tmp_path: Path, tokens_per_word: int
) -> None:
    fake = FakeServer(tokens_per_word=tokens_per_word)
    with serving(fake):
        result = measured(tmp_path, "--url", fake.url, "--only", "prefill-512,prefill-4k,ttft", "--runs", "1")
    for name, wanted in (("prefill-512", 512), ("prefill-4k", 4096), ("ttft", 2048 + 32)):
        for run in load_of(result, name)["runs"]:
            for answer in run["answers"]:
                assert abs(answer["prompt_tokens"] - wanted) <= tokens_per_word
                assert answer["max_tokens"] == 1


def test_cold_is_cold_and_warm_has_the_same_prefix(tmp_path: Path) -> None:
    fake = FakeServer(reports_cache=True)
    with serving(fake):
        result = measured(tmp_path, "--url", fake.url, "--only", "ttft", "--runs", "2")
    for run in load_of(result, "ttft")["runs"]:
        cold, warm = run["answers"]
        assert cold["cached_tokens"] < 16
        assert 2048 - 16 <= warm["cached_tokens"] < warm["prompt_tokens"]
    assert not [note for note in result["notes"] if "new prompt" in note]


@pytest.mark.parametrize("num_streams", [8, 16])
def test_streams_run_at_once(fake: FakeServer, tmp_path: Path, num_streams: int) -> None:
    name = f"streams-{num_streams}"
    result = measured(tmp_path, "--url", fake.url, "--only", name, "--runs", "1", "--tokens", "5")
    assert fake.most_running == num_streams
    assert len(fake.bodies) == CALIBRATION + 2 * num_streams
    assert all(len(run["answers"]) == num_streams for run in load_of(result, name)["runs"])


def test_an_answer_that_ends_early_is_counted_as_it_is_and_said(tmp_path: Path, capsys: Any) -> None:
    fake = FakeServer(stops_after=3)
    with serving(fake):
        result = measured(tmp_path, "--url", fake.url, "--only", "single", "--runs", "2", "--tokens", "8")
    assert [run["answers"][0]["completion_tokens"] for run in load_of(result, "single")["runs"]] == [3, 3, 3]
    note = "single: A ended 2 of 2 answers early, the shortest after 3 of 8 tokens"
    assert note in result["notes"]
    assert note in capsys.readouterr().out


def test_tokens_come_from_usage_and_not_from_chunks(tmp_path: Path) -> None:
    fake = FakeServer(tokens_per_chunk=4)
    with serving(fake):
        result = measured(tmp_path, "--url", fake.url, "--only", "single", "--runs", "1", "--tokens", "12")
    (answer,) = load_of(result, "single")["runs"][-1]["answers"]
    assert answer["completion_tokens"] == 12
    assert len(answer["arrivals"]) == 3


# --------------------------------------------------------------------------- two endpoints


def test_a_and_b_take_turns_and_ratios_are_paired(tmp_path: Path, capsys: Any) -> None:
    log: list[str] = []
    one, other = FakeServer("one", log, owned_by="llamacpp"), FakeServer("other", log, owned_by="vllm", context=4200)
    picture = tmp_path / "picture.svg"
    with serving(one, other):
        result = measured(
            tmp_path, "--url", one.url, "--against", other.url + "/v1/", "--model-against", "asked", "--only",
            "single,prefill-512", "--runs", "3", "--tokens", "4", "--picture", str(picture),
        )  # fmt: skip
    assert log == ["one"] * CALIBRATION + ["other"] * CALIBRATION + ["one", "other"] * 2 * (1 + 3)
    assert one.bodies[-1]["cache_prompt"] is True
    assert one.bodies[-1]["model"] == "one-model"
    assert other.bodies[-1]["model"] == "asked"
    assert len(one.bodies[-1]["prompt"].split()) == len(other.bodies[-1]["prompt"].split())
    for load in result["loads"]:
        assert [(run["endpoint"], run["run"]) for run in load["runs"]] == [
            (label, number) for number in range(4) for label in "AB"
        ]
        (metric,) = load["metrics"]
        name = metric["name"]
        a, b = (
            [run["values"][name] for run in load["runs"] if run["counted"] and run["endpoint"] == label]
            for label in "AB"
        )
        ratios = sorted(x / y for x, y in zip(a, b, strict=True))
        assert load["ratio_a_b"][name] == {
            "median": ratios[1], "least": ratios[0], "most": ratios[2], "num_runs": 3
        }  # fmt: skip
    described = result["endpoints"]
    assert described["A"]["software"] == "llama.cpp"
    assert described["A"]["version"] == "b1234-abcd"
    assert described["A"]["context_tokens"] == 8192
    assert described["B"]["software"] == "vLLM"
    assert described["B"]["version"] == "0.9.9"
    assert described["B"]["kv_bytes_per_token"] is None
    text = capsys.readouterr().out
    assert "A/B" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_a_context_that_is_too_small_skips_a_load_and_says_why(tmp_path: Path, capsys: Any) -> None:
    one, other = FakeServer("one"), FakeServer("other", context=2048)
    with serving(one, other):
        result = measured(
            tmp_path, "--url", one.url, "--against", other.url, "--only", "prefill-4k,ttft", "--runs", "1"
        )
    load = load_of(result, "prefill-4k")
    assert load["skipped"] == "needs a context of 4097 tokens; B has 2048"
    assert load["runs"] == []
    assert "prefill-4k: skipped: needs a context of 4097 tokens; B has 2048" in capsys.readouterr().out
    # Both get a prefix that fits the smaller one.
    assert all(answer["prompt_tokens"] < 1100 for run in load_of(result, "ttft")["runs"] for answer in run["answers"])


def test_an_endpoint_that_hides_its_context(tmp_path: Path) -> None:
    def fails(body: dict[str, Any]) -> Any:
        long = len(body["prompt"].split()) > 1000
        return error(400, "the request exceeds the available context size") if long else None

    fake = FakeServer(context=None, fails=fails)
    with serving(fake):
        result = measured(tmp_path, "--url", fake.url, "--only", "prefill-4k,documents", "--runs", "1")
        assert "exceeds the available context size" in load_of(result, "prefill-4k")["skipped"]
        assert load_of(result, "documents")["skipped"] == "the context is not known; give --context"
        result = measured(
            tmp_path, "--url", fake.url, "--only", "documents", "--runs", "1", "--tokens", "2", "--context", "1000"
        )
    values = load_of(result, "documents")["runs"][0]["values"]
    assert values["context"] is None
    assert abs(values["prompt"] - 1000 * 15 / 32) <= 2


# --------------------------------------------------------------------------- sweep and documents


def test_the_sweep_asks_every_level_and_marks_a_knee(fake: FakeServer, tmp_path: Path, capsys: Any) -> None:
    picture = tmp_path / "picture.svg"
    result = measured(
        tmp_path, "--url", fake.url, "--only", "sweep", "--runs", "1", "--tokens", "2", "--picture", str(picture)
    )
    assert [load["name"] for load in result["loads"]] == [f"sweep-{level}" for level in (1, 2, 4, 8, 16, 32)]
    for load, level in zip(result["loads"], (1, 2, 4, 8, 16, 32), strict=True):
        assert [len(run["answers"]) for run in load["runs"]] == [level, level]
    assert fake.most_running == 32
    rates = {int(load["name"][6:]): load["summary"]["A"]["whole"]["median"] for load in result["loads"]}
    expected = min(level for level, rate in rates.items() if rate >= 0.9 * max(rates.values()))
    assert result["knee"] == {"A": expected}
    text = capsys.readouterr().out
    marked = [line for line in text.splitlines() if line.endswith("*")]
    assert [line.split()[0] for line in marked] == [str(expected)]
    assert f" at {expected}<" in picture.read_text()


@pytest.mark.parametrize("reports_cache", [True, False])
def test_the_document_load(tmp_path: Path, reports_cache: bool, capsys: Any) -> None:
    fake = FakeServer(context=1024, reports_cache=reports_cache)
    with serving(fake):
        result = measured(tmp_path, "--url", fake.url, "--only", "documents", "--runs", "2", "--tokens", "3")
    load = load_of(result, "documents")
    assert fake.most_running == 8
    assert [(run["run"], len(run["answers"])) for run in load["runs"]] == [(1, 100), (2, 100)]
    prompts = [body["prompt"].split() for body in fake.bodies[CALIBRATION:]]
    documents = {tuple(prompt[:100]) for prompt in prompts}
    assert len(documents) == 2 * 10  # ten in each run, new ones each time
    values = load["runs"][0]["values"]
    assert values["context"] == 1024
    assert abs(values["prompt"] - 480) <= 2
    assert 1 <= values["stable"] <= 8
    assert values["miss"] > 0
    assert values["hit"] > 0
    assert values["kv"] is None
    assert values["preemptions"] is None
    assert (values["found"] is not None) == reports_cache
    if reports_cache:
        assert 80 < values["found"] < 100
    assert "KV per request, MiB" in (text := capsys.readouterr().out)
    assert next(line for line in text.splitlines() if line.startswith("KV per request")).split()[-1] == "n/a"


# --------------------------------------------------------------------------- everything, and its JSON


def test_every_load_by_default_and_the_shape_of_the_json(fake: FakeServer, tmp_path: Path, capsys: Any) -> None:
    result = measured(tmp_path, "--url", fake.url, "--runs", "1", "--tokens", "2", "--prompt-seed", "5")
    assert set(result) == {
        "format", "command", "kvd_version", "started", "seconds", "seed", "num_runs", "machine", "endpoints", "loads",
        "knee", "knee_share", "notes",
    }  # fmt: skip
    assert result["format"] == 1
    assert result["seed"] == 5
    assert result["command"][:3] == ["kvd", "bench", "--url"]
    assert list(dict.fromkeys(load["group"] for load in result["loads"])) == list(GROUPS)
    assert set(result["machine"]) == {
        "cpu", "instruction_sets", "logical_cpus", "usable_cpus", "memory_bytes", "system", "python"
    }  # fmt: skip
    for load in result["loads"]:
        assert set(load) == {
            "name", "group", "skipped", "needed_tokens", "metrics", "summary", "ratio_a_b", "runs"
        }  # fmt: skip
        assert load["skipped"] is None
        names = [metric["name"] for metric in load["metrics"]]
        assert list(load["summary"]["A"]) == names
        for run in load["runs"]:
            assert set(run) == {
                "endpoint", "run", "counted", "seconds", "client_cpu_seconds", "values", "answers"
            }  # fmt: skip
            assert list(run["values"]) == names
            for answer in run["answers"]:
                assert set(answer) == {
                    "sent", "arrivals", "last", "prompt_tokens", "completion_tokens", "max_tokens", "cached_tokens"
                }  # fmt: skip
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "the client itself used" in text


def test_the_same_seed_makes_the_same_prompts(fake: FakeServer, tmp_path: Path) -> None:
    words = ("--url", fake.url, "--only", "single", "--runs", "2", "--tokens", "2", "--prompt-seed")
    prompts = []
    for seed in ("1", "1", "2"):
        del fake.bodies[:]
        measured(tmp_path, *words, seed)
        prompts.append([body["prompt"] for body in fake.bodies[CALIBRATION:]])
    assert prompts[0] == prompts[1]
    assert not set(prompts[0]) & set(prompts[2])


def test_json_on_stdout_leaves_the_table_to_stderr(fake: FakeServer, capsys: Any) -> None:
    assert (
        cli.main(["bench", "--url", fake.url, "--only", "single", "--runs", "1", "--tokens", "2", "--json", "-"]) == 0
    )
    output = capsys.readouterr()
    assert json.loads(output.out)["format"] == 1
    assert "1 stream, decode" in output.err


def test_keys_are_sent_and_shown_nowhere(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServer(api_key="hush")
    with serving(fake):
        words = ("--url", fake.url, "--only", "single", "--runs", "1", "--tokens", "2")
        result = measured(tmp_path, *words, "--api-key", "hush")
        assert "hush" not in (tmp_path / "result.json").read_text() + capsys.readouterr().out
        assert result["command"].count("(hidden)") == 1
        monkeypatch.setenv("KVD_API_KEY", "hush")
        measured(tmp_path, *words)
        monkeypatch.delenv("KVD_API_KEY")
        assert cli.main(["bench", *words]) == 1
    assert "HTTP 401: wrong key" in capsys.readouterr().err


def test_which_words_hide_a_key() -> None:
    assert bench_options.without_keys(["--api-key", "a", "b", "--runs", "3"]) == [
        "--api-key", "(hidden)", "(hidden)", "--runs", "3"
    ]  # fmt: skip
    assert bench_options.without_keys(["--api_key=a", "--api-key-against", "b"]) == [
        "--api_key=(hidden)", "--api-key-against", "(hidden)"
    ]  # fmt: skip


# --------------------------------------------------------------------------- how it fails


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "http://192.0.2.1:8000"], "--url: 192.0.2.1 is not this machine; add --allow-remote"),
        (["--url", "http://127.0.0.1:9", "--against", "http://example.org"], "--against: example.org is not this"),
        (["--url", "ftp://127.0.0.1"], "--url: expected http://HOST:PORT"),
        (["--url", "http://127.0.0.1:99999"], "--url: Port out of range"),
        (["--url", "127.0.0.1:9", "--only", "single,nothing"], "--only: no load is called 'nothing'"),
        (["--url", "127.0.0.1:9", "--only", ","], "--only: expected names"),
        (["--url", "127.0.0.1:9", "--runs", "0"], "--runs: expected a whole number from 1"),
        (["--url", "127.0.0.1:9", "--tokens", "1"], "--tokens: expected a whole number from 2"),
        (["--url", "127.0.0.1:9", "--max-num-seqs", "1"], "--max-num-seqs: unknown here"),
        (["--url", "127.0.0.1:9", "--model-against", "x"], "--model-against is of no use without --against"),
        (["--url", "127.0.0.1:9", "--json", "/no/such/folder/x"], "--json: /no/such/folder/x: its folder does not"),
        (["--max-modle-len", "5"], "--max-modle-len: unknown flag; did you mean --max-model-len?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], message: str, capsys: Any) -> None:
    assert cli.main(["bench", *words]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"kvd: {message}")
    assert output.err.count("\n") == 1
    assert output.out == ""


def broken(**changes: Any) -> Any:
    return lambda: FakeServer(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (broken(has_usage=False), "the stream has no usage"),
        (broken(breaks_off=True), "/v1/completions: "),
        (broken(fails=lambda body: error(500, "on fire")), "POST /v1/completions: HTTP 500: on fire"),
        (broken(fails=lambda body: error(429, "slow down")), "HTTP 429: slow down"),
        (broken(owned_by="kvd"), "GET /kvd/snapshot: HTTP 404"),
        (broken(tokens_per_word=0), "usage.prompt_tokens does not grow with the prompt: 3, then 3"),
    ],
)
def test_an_endpoint_that_fails_is_one_line(make: Any, message: str, capsys: Any) -> None:
    fake = make()
    with serving(fake):
        assert cli.main(["bench", "--url", fake.url, "--only", "single", "--runs", "1"]) == 1
    output = capsys.readouterr()
    assert output.err.startswith(f"kvd: A ({fake.url}): ")
    assert message in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_a_failure_among_many_streams_is_one_line_and_ends_the_others(capsys: Any) -> None:
    count = iter(range(1000))
    fake = FakeServer(
        never_answers=True, fails=lambda body: error(503, "full") if next(count) == CALIBRATION + 7 else None
    )
    with serving(fake):
        assert cli.main(["bench", "--url", fake.url, "--only", "streams-8", "--runs", "1"]) == 1
    assert capsys.readouterr().err == f"kvd: A ({fake.url}): POST /v1/completions: HTTP 503: full\n"
    assert fake.num_aborted == 7


def test_nobody_listens(capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert cli.main(["bench", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert capsys.readouterr().err == f"kvd: A (http://127.0.0.1:{port}): nothing answers there: Connection refused\n"


# --------------------------------------------------------------------------- with a real server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("bench") / "tiny", max_position_embeddings=4096)


SMALL = ("--kv-cache-memory-bytes", "32MiB", "--max-num-seqs", "8", "--max-model-len", "1024")


def test_against_a_running_kvd(model: Path, tmp_path: Path) -> None:
    running = Process(tmp_path / "home", str(model), "--port", "0", *SMALL, "--api-key", "hush")
    try:
        words = ("--url", running.url(), "--api-key", "hush", "--only", "single,streams-8,documents", "--runs", "1")
        result = measured(tmp_path, *words, "--tokens", "3")
    finally:
        running.stop(signal.SIGTERM)
    about = result["endpoints"]["A"]
    assert about["software"] == "kvd"
    assert about["context_tokens"] == 1024
    values = load_of(result, "documents")["runs"][0]["values"]
    tokens = values["prompt"] + 3
    blocks = math.ceil(tokens / (about["kv_block_bytes"] / about["kv_bytes_per_token"]))
    assert values["kv"] == pytest.approx(blocks * about["kv_block_bytes"] / 2**20, rel=0.05)
    assert values["preemptions"] is not None
    assert values["found"] > 50
    for name in ("single", "streams-8", "documents"):
        for run in load_of(result, name)["runs"]:
            assert all(answer["completion_tokens"] == 3 for answer in run["answers"])


def children_of(pid: int) -> list[int]:
    """Processes that the main thread of `pid` started."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def start_bench(home: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvd", "bench", *words],
        cwd=ROOT,
        env=os.environ | {"KVD_HOME": str(home), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_starts_kvd_itself_and_stops_it(model: Path, tmp_path: Path, capsys: Any) -> None:
    before = children_of(os.getpid())
    result = measured(tmp_path, str(model), *SMALL, "--only", "single", "--runs", "1", "--tokens", "3")
    assert result["endpoints"]["A"]["software"] == "kvd"
    assert result["endpoints"]["A"]["context_tokens"] == 1024
    assert children_of(os.getpid()) == before
    assert capsys.readouterr().err == ""


def test_a_kvd_that_cannot_start_is_one_line(tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["bench", "/no/such/model", "--only", "single"]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("kvd: kvd serve did not start (exit code 1): ")
    assert "/no/such/model" in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "code", "delay_seconds"),
    [
        (signal.SIGINT, 130, 6.0),
        pytest.param(signal.SIGTERM, 143, 6.0, marks=pytest.mark.full),
        (signal.SIGINT, 130, 0.0),
    ],
    ids=["interrupt", "terminate", "interrupt-while-it-starts"],
)
def test_a_signal_ends_it_and_its_server(
    model: Path, tmp_path: Path, number: signal.Signals, code: int, delay_seconds: float
) -> None:
    process = start_bench(tmp_path / "home", str(model), *SMALL, "--only", "single", "--tokens", "900", "--runs", "900")
    children: list[int] = []
    try:
        while process.poll() is None and not children:
            children = children_of(process.pid)
            time.sleep(0.05)
        time.sleep(delay_seconds)
        process.send_signal(number)
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert output == ""
    assert children
    assert not any(map(is_alive, children))
