"""What `kvd plan` says before, and what `kvd serve` then takes: the same, on the default model and real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvd.model.files import ModelFiles
from tests.test_serve import ROOT, Process, call

MODEL = "smollm2-135m-instruct"
TOLERANCE = 0.02

CASES = {
    "a share of the memory": "--cpu-memory-utilization 0.02 --max-num-batched-tokens 512 --max-num-seqs 8",
    "an exact size in 16 bits": "--kv-cache-memory-bytes 64MiB --kv-cache-dtype fp16 --max-model-len 2048",
    "an exact number of blocks": "--num-gpu-blocks-override 300 --swap-space 0.05",
}


@contextmanager
def serving(home: Path, words: str) -> Iterator[str]:
    process = Process(home, MODEL, "--port", "0", "--no-dashboard", "--device", "cpu", *words.split())
    try:
        yield process.url()
    finally:
        if process.process.poll() is None:
            process.stop(signal.SIGTERM)


def plan(home: Path, *words: str) -> dict[str, Any]:
    environment = {"KVD_HOME": str(home), "OMP_NUM_THREADS": "1", "PATH": ""}
    command = [sys.executable, "-m", "kvd", "plan", *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def close_to(value: float) -> Any:
    return pytest.approx(value, rel=TOLERANCE)


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=[pytest.mark.full] * (number > 0)) for number, words in enumerate(CASES.values())],
    ids=CASES,
)
def test_serve_takes_what_plan_said(words: str, kvd_home: Path, default_model_files: ModelFiles) -> None:
    with serving(kvd_home, words) as url:
        info = call(f"{url}/kvd/snapshot")[1]["info"]
    budget = info["budget"]
    # Free memory changes from second to second: plan for what that server found.
    free = budget["total_bytes"]
    found = plan(kvd_home, MODEL, "--device", "cpu", "--memory", str(free), *words.split())
    memory = found["memory"]
    assert memory["weight_bytes"] == budget["weight_bytes"]
    assert memory["block_bytes"] == budget["block_bytes"]
    assert memory["bytes_per_token"] == budget["bytes_per_token"]
    assert memory["kv_bytes"] == close_to(budget["kv_bytes"])
    assert memory["num_blocks"] == close_to(budget["num_blocks"])
    assert found["max_model_len"] == info["max_model_len"]
    assert found["settings"] == info["geometry"]["choice"]
    assert found["shape"] == info["geometry"]["shape"]
    assert found["bytes_per_token"]["fp16"] == budget["bytes_per_token_16bit"]
    assert memory["activation_bytes"] <= budget["activation_bytes"]  # serve adds what its largest step was seen to take


def test_a_running_server_is_planned_for_with_the_lengths_it_has_seen(
    kvd_home: Path, default_model_files: ModelFiles
) -> None:
    with serving(kvd_home, CASES["an exact number of blocks"]) as url:
        before = plan(kvd_home, "--from", url)
        for _ in range(3):
            body = {"model": MODEL, "prompt": "one two three", "max_tokens": 8, "ignore_eos": True}
            assert call(f"{url}/v1/completions", body)[0] == 200
        after = plan(kvd_home, "--from", url)
        other = plan(kvd_home, "--from", url, "--kv-cache-dtype", "fp16", "--num-gpu-blocks-override", "100")
        budget = call(f"{url}/kvd/snapshot")[1]["info"]["budget"]
        with_prefix = plan(kvd_home, "--from", f"{url}/v1")
    assert before["seen"] is None
    assert before["recommended"]["max_model_len"] is None
    for name in ("weight_bytes", "kv_bytes", "num_blocks", "block_bytes"):
        assert after["memory"][name] == budget[name]
    assert after["seen"]["num_requests"] == 3
    assert 5 <= after["seen"]["answer"]["p99"] <= 10
    seen = after["seen"]["prompt"]["p99"] + after["seen"]["answer"]["p99"]
    assert 0 <= after["recommended"]["max_model_len"] - 1.2 * seen < 16
    assert other["memory"]["num_blocks"] == 100
    assert other["settings"]["kv_cache_dtype"] == "fp16"
    assert with_prefix["seen"] == after["seen"]
