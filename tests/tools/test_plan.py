"""`kvd plan`: models on disk and by numbers, cards, what is printed, and what is said of bad input."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import struct
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvd.cache.sizing import GIB
from kvd.cli import main
from kvd.config import Config
from kvd.engine.memory_budget import prepared_weight_bytes
from kvd.errors import ConfigError, KvdError, StartupError
from kvd.model.loading import load_weights, read_spec, resolve_model
from kvd.model.progress import QuietProgress
from kvd.tools import plan, plan_machine, plan_model, plan_picture, plan_text
from kvd.tools.cards import CARDS, capability_problem, find_card, known_card
from kvd.tools.plan_options import parse
from kvd.tools.plan_report import PlanReport
from kvd_kernels.registry import create_ops
from kvd_kernels.triton.cards import KNOWN_CARDS
from kvd_kernels.triton.packing import packed_bytes
from kvd_kernels.weights import Linear
from tests.model.checkpoints import make_awq, make_gguf, make_llama, make_qwen2, rewrite_json

QWEN_7B = (
    "--layers 28 --heads 28 --kv-heads 4 --head-dim 128 --hidden 3584 --intermediate 18944 --vocab 152064 "
    "--positions 131072"
)
LLAMA_7B = "--layers 32 --heads 32 --head-dim 128 --hidden 4096 --intermediate 11008 --vocab 32000 --positions 4096"
LLAMA31_70B = (
    "--layers 80 --heads 64 --kv-heads 8 --head-dim 128 --hidden 8192 --intermediate 28672 --vocab 128256 "
    "--positions 131072"
)
KIB = 1024
NAMES_IN_CONFIG = {"--vocab": "vocab_size", "--hidden": "hidden_size", "--heads": "num_attention_heads"}


def made(words: str, home: Path | None = None) -> PlanReport:
    environment = {} if home is None else {"KVD_HOME": str(home)}
    return plan.make_report(parse(words.split(), environment))


# --------------------------------------------------------------------------- worked examples


@pytest.mark.parametrize(
    ("model", "dtype", "asked", "num_bytes"),
    [
        (QWEN_7B, "fp16", "1x8192", 469_762_048),
        (QWEN_7B, "fp16", "1x32K", 1.75 * GIB),
        (LLAMA_7B, "fp16", "8x4096", 16 * GIB),
        (LLAMA_7B, "bf16", "64x2K", 64 * GIB),
        (LLAMA31_70B, "fp16", "1x8192", 2.5 * GIB),
        (LLAMA31_70B, "fp16", "32x8192", 80 * GIB),
        (LLAMA31_70B, "fp16", "1x32K", 10 * GIB),
    ],
)
def test_what_requests_take(model: str, dtype: str, asked: str, num_bytes: float) -> None:
    report = made(f"{model} --kv-cache-dtype {dtype} --requests {asked} --memory 400GiB")
    assert report.asked is not None
    assert report.asked.kv_bytes == num_bytes
    assert report.asked.fits


@pytest.mark.parametrize(("model", "kib"), [(QWEN_7B, 56), (LLAMA_7B, 512), (LLAMA31_70B, 320)])
def test_bytes_per_token_by_dtype(model: str, kib: int) -> None:
    found = made(f"{model} --memory 400GiB").as_dict()["bytes_per_token"]
    assert found["fp16"] == kib * KIB
    assert found["fp8_e4m3"] == kib * KIB / 2
    assert found["int8"] == kib * KIB / 2 * (128 + 2) / 128  # two bytes of scale for each head's 128 channels


def test_64_requests_of_2048_tokens_take_64_gib_and_32_do_in_32() -> None:
    small, large = (
        made(f"{LLAMA_7B} --kv-cache-dtype fp16 --requests 64x2K --kv-cache-memory-bytes {size}GiB --memory 120GiB")
        for size in (32, 64)
    )
    assert (small.asked and small.asked.num_fitting, small.asked and small.asked.fits) == (32, False)
    assert (large.asked and large.asked.num_fitting, large.asked and large.asked.fits) == (64, True)


def test_a_7b_in_awq_has_5_6_gb_on_disk_since_its_ends_stay_in_16_bits() -> None:
    report = made(f"{QWEN_7B} --quantization awq --gpu rtx-4090")
    assert report.subject.file_bytes is not None
    assert report.subject.file_bytes / 1e9 == pytest.approx(5.6, abs=0.05)
    assert report.fits.weight_bytes < report.subject.file_bytes  # kvd rounds both ends to int8


def test_sliding_windows_by_number() -> None:
    report = made(f"{QWEN_7B} --window 4096 --windowed-layers 14 --memory 24GiB")
    assert report.geometry.shape.layer_windows == ((0, 14), (4096, 14))
    assert "14 of them with a window of 4,096 tokens" in "\n".join(plan_text.lines(report))
    whole = made(f"{QWEN_7B} --window 4096 --memory 24GiB")
    assert whole.fits.requests(65_536) == whole.fits.requests(131_072) > report.fits.requests(65_536)


# --------------------------------------------------------------------------- models on disk


def gguf_file(path: Path) -> Path:
    make_gguf(path)
    return path


MAKERS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: make_llama(path),
    "tied": lambda path: make_llama(path, tie_word_embeddings=True),
    "qwen2": lambda path: make_qwen2(path),
    "awq": lambda path: make_awq(path),
    "gguf": lambda path: gguf_file(path / "model.gguf"),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_weights_are_counted_as_start_up_counts_them(name: str, backend: str, tmp_path: Path) -> None:
    tmp_path.joinpath("model").mkdir(exist_ok=True)
    model = MAKERS[name](tmp_path / "model")
    home = tmp_path / "home"
    files = resolve_model(str(model), home=home, revision=None, progress=QuietProgress())
    weights = load_weights(files, read_spec(files), progress=QuietProgress())
    for again in range(2):  # the second time from what serving a GGUF file has prepared
        report = made(f"{model} --device cpu --backend {backend} --memory 4GiB", home)
        assert report.fits.weight_bytes == prepared_weight_bytes(create_ops(backend, 1), weights), again
        assert report.subject.quantization == read_spec(files).quantization


@pytest.mark.parametrize("name", MAKERS)
def test_on_a_gpu_weights_are_counted_as_it_packs_them(name: str, tmp_path: Path) -> None:
    tmp_path.joinpath("model").mkdir(exist_ok=True)
    model = MAKERS[name](tmp_path / "model")
    files = resolve_model(str(model), home=tmp_path / "home", revision=None, progress=QuietProgress())
    weights = load_weights(files, read_spec(files), progress=QuietProgress())

    class Packs:
        def prepared_bytes(self, linear: Linear, /) -> int:
            return packed_bytes(linear)

    assert made(f"{model} --gpu l4", tmp_path / "home").fits.weight_bytes == prepared_weight_bytes(Packs(), weights)


def test_a_config_alone_will_do_and_is_said(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", dtype=torch.float16)
    whole = made(f"{model} --device cpu --memory 1GiB")
    model.joinpath("model.safetensors").unlink()
    alone = made(f"{model} --device cpu --memory 1GiB")
    assert alone.fits == whole.fits
    assert any("no safetensors file" in note for note in alone.subject.notes)
    assert not any("no safetensors file" in note for note in whole.subject.notes)


def test_the_catalogue_is_read_where_it_is_on_disk_and_nothing_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"smollm2-135m-instruct is not on disk yet .* kvd plan fetches nothing"):
        made("smollm2-135m-instruct --device cpu", tmp_path)
    with pytest.raises(StartupError, match="org/name: neither a path, nor downloaded yet"):
        made("org/name --device cpu", tmp_path)
    copy = tmp_path / "hub" / "org--name" / ("0" * 40)
    copy.mkdir(parents=True)
    make_llama(copy)
    copy.joinpath(".complete").touch()
    assert made(f"org/name --revision {'0' * 40} --device cpu", tmp_path).subject.model == "org/name"


# --------------------------------------------------------------------------- bad input


def broken_header(folder: Path) -> str:
    model = make_llama(folder / "model")
    path = model / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 20) + b"{not json at all....")
    return str(model)


def short_file(folder: Path) -> str:
    model = make_llama(folder / "model")
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return str(model)


def other_shape(folder: Path) -> str:
    model = make_llama(folder / "model")
    rewrite_json(model / "config.json", intermediate_size=128)
    return str(model)


def empty_folder(folder: Path) -> str:
    return str(folder)


def no_gguf(folder: Path) -> str:
    path = folder / "x.gguf"
    path.write_bytes(b"GGUF, but no more")
    return str(path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (broken_header, "model.safetensors: the safetensors header is not valid JSON"),
        (short_file, "model.safetensors: truncated: tensor"),
        (other_shape, "has the shape [256, 128], the config says [128, 128]"),
        (empty_folder, "config.json: file is missing, which describes the model, and no GGUF file either"),
        (no_gguf, "x.gguf: truncated, or no GGUF file"),
    ],
)
def test_a_damaged_model_is_named_in_one_line(
    make: Callable[[Path], str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make(tmp_path)
    assert main(["plan", model, "--device", "cpu", "--memory", "1GiB"]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("kvd: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--gpu rtx-4095", "--gpu: no card is called 'rtx-4095'; did you mean rtx-4090"),
        ("--gpu banana", "there are rtx-3060-12gb, "),
        ("--gpu l4 --memory 24GiB", "--gpu and --memory exclude each other"),
        ("--gpu l4 --device cpu", "--gpu: the configuration computes on the CPU"),
        ("--memory -3", "--memory: expected a size in bytes"),
        ("--memory 0", "--memory: expected a size in bytes"),
        ("--memory 24", "--memory: expected 1MiB or more, got '24'; is 24GiB meant?"),
        ("--memory 3KiB", "--memory: expected 1MiB or more, got '3KiB'"),
        ("--layers -1 --kv-heads 2 --head-dim 64", "--layers: expected a whole number from 1 to 4,096, got '-1'"),
        ("--layers 5000 --kv-heads 2 --head-dim 64", "--layers: expected a whole number from 1 to 4,096"),
        ("--layers 2 --kv-heads 0 --head-dim 64", "--kv-heads: expected a whole number"),
        ("--layers 2 --kv-heads 2 --head-dim 6", "--head-dim: 6 is not served"),
        ("--layers 2 --kv-heads 2 --head-dim 512", "--head-dim: 512 is not served"),
        ("--layers 2 --heads 3 --kv-heads 2 --head-dim 64", "--kv-heads: 3 heads are no multiple of 2"),
        ("--layers 2 --head-dim 64", "--kv-heads is missing"),
        ("--kv-heads 2 --head-dim 64", "--layers is missing"),
        ("--layers 2 --kv-heads 2 --head-dim 64 --parameters=-7B", "--parameters: expected a number of parameters"),
        ("--layers 2 --kv-heads 2 --head-dim 64 --parameters 7X", "--parameters: expected a number of parameters"),
        ("--layers 2 --kv-heads 2 --head-dim 64 --windowed-layers 1", "--windowed-layers: --window says"),
        ("--layers 2 --kv-heads 2 --head-dim 64 --window 9 --windowed-layers 3", "--windowed-layers: 3 of 2 layers"),
        ("--layers 2 --kv-heads 2 --head-dim 64 some-model", "--layers: a model by numbers and a model by name"),
        ("--requests 8", "--requests: expected REQUESTSxTOKENS"),
        ("--requests 0x100", "--requests: expected REQUESTSxTOKENS"),
        ("--requests 3x1.5", "--requests: expected REQUESTSxTOKENS"),
        ("--chart plan.png", "--chart: expected a file that ends in .svg"),
        ("--from http://10.0.0.1:8000", "--from: 10.0.0.1 is not this machine; add --allow-remote"),
        ("--from http://127.0.0.1:1 --gpu l4", "--from: the server says what memory it has"),
        ("--max-modle-len 5", "did you mean --max-model-len?"),
        ("--kv-cache-dtype int9", "--kv-cache-dtype: expected one of"),
    ],
)
def test_bad_words_are_refused_in_one_line(words: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(words)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_fp8_on_the_cpu_is_refused_as_start_up_refuses_it() -> None:
    with pytest.raises(ConfigError, match="fp8_e4m3 is refused on the CPU"):
        made(f"{QWEN_7B} --kv-cache-dtype fp8 --device cpu")
    assert made(f"{QWEN_7B} --kv-cache-dtype fp8 --gpu h100").fits.bytes_per_token == 28 * KIB


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--vocab 2147483647", "a vocabulary of 2,147,483,647 tokens is more than any model has"),
        ("--hidden 2147483646", "is larger than any model has"),
        ("--heads 2147483640", "is larger than any model has"),
    ],
)
def test_sizes_that_no_model_has_are_refused_at_once(words: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(KvdError, match=f"^--layers and the other sizes: .*{error}"):
        made(f"--layers 32 --kv-heads 8 --head-dim 128 --gpu l4 {words}")
    flag, number = words.split()
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_CONFIG, NAMES_IN_CONFIG[flag]: int(number)}))
    with pytest.raises(KvdError, match=r"^[^\n]*config\.json: [^\n]*$"):
        made(f"{tmp_path} --gpu l4")


@pytest.mark.parametrize("name", ["/tmp/" + "x" * 5000, "~nobody-has-this-name/model"])
def test_a_name_that_no_file_can_have_is_one_line(name: str) -> None:
    with pytest.raises(KvdError, match=r"^[^\n]{1,200}$"):
        made(name)


def test_without_a_ram_tier_too_little_memory_is_said_of_the_weights() -> None:
    report = made(f"{QWEN_7B} --quantization awq --device cpu --memory 1MiB")
    assert "the weights need" in report.fits.refusal


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(StartupError, match=r"^--from: http://127.0.0.1:1 does not answer"):
        made("--from http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"SSH-2.0-OpenSSH\r\n", r"sent no HTTP answer \(BadStatusLine\)"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "sent no snapshot of kvd|sent no HTTP answer"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", "answered 302"),
    ],
)
def test_a_server_of_another_kind_is_one_line_and_gets_the_key_alone(answer: bytes, error: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(StartupError, match=rf"^--from: http://[^\n]*({error})[^\n]*$"):
            made(f"--from http://127.0.0.1:{listening.getsockname()[1]} --api-key secret")
        thread.join()


# --------------------------------------------------------------------------- cards


def test_every_card_is_found_by_its_name_and_as_drivers_write_it() -> None:
    for card in CARDS:
        for name in (card.name, card.name.lower().replace(" ", "-"), f"NVIDIA {card.name}", card.name.replace(" ", "")):
            assert find_card(name) is card, name
        assert 0.9 * 10 < card.total_gib < 200
    for name in ("4090", "rtx4090", "GeForce RTX 4090", "NVIDIA GeForce RTX 4090"):
        assert find_card(name).name == "RTX 4090"
    for known in KNOWN_CARDS:
        card = known_card(known.name)
        assert card is not None, known.name
        assert 10 * card.capability[0] + card.capability[1] == known.architecture


def test_names_do_not_mean_two_cards() -> None:
    from kvd.tools.cards import _spellings

    seen: dict[str, str] = {}
    for card in CARDS:
        for spelling in _spellings(card):
            assert seen.setdefault(spelling, card.name) == card.name


def test_a_card_that_kvd_has_no_kernels_for_is_refused_with_its_capability() -> None:
    with pytest.raises(StartupError, match=r"T4 has compute capability 7\.5, for which kvd has no kernels"):
        made(f"{QWEN_7B} --gpu t4")
    assert [card.name for card in CARDS if capability_problem(card.name, card.capability)] == ["T4"]


def test_the_share_of_the_card_and_the_assumptions_are_said() -> None:
    report = made(f"{QWEN_7B} --quantization awq --gpu rtx-4090")
    total = report.geometry.room.total_bytes
    assert total == int(23.64 * GIB)
    assert report.fits.limit_bytes == int(total * 0.9)
    used = report.fits.weight_bytes + report.fits.step_bytes + report.fits.kv_bytes
    assert 0 <= report.fits.limit_bytes - used < 131_072 * 128 * 4 + 2 * report.fits.block_bytes
    assert report.kv_share == report.fits.kv_bytes / total
    notes = "\n".join(report.subject.notes)
    assert "assumed: a step takes" in notes
    assert "CUDA context" in notes


def test_more_of_the_card_and_smaller_elements_hold_more() -> None:
    def blocks(words: str) -> int:
        return made(f"{QWEN_7B} --quantization awq --gpu rtx-4090 {words}").fits.num_blocks

    assert blocks("--gpu-memory-utilization 0.6") < blocks("") < blocks("--gpu-memory-utilization 0.95")
    assert blocks("--kv-cache-dtype fp16") < blocks("--kv-cache-dtype int8") < blocks("--kv-cache-dtype fp8")
    assert blocks("--max-num-batched-tokens 16384") < blocks("--max-num-batched-tokens 2048")


class FakeNvml:
    """A driver with one card."""

    class NVMLError(Exception):
        pass

    def __init__(self, name: str, capability: tuple[int, int], total: int, free: int) -> None:
        self.name, self.capability, self.total, self.free = name, capability, total, free

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index:
            raise self.NVMLError("no such card")
        return "handle"

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return self.name.encode()

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return type("Memory", (), {"total": self.total, "free": self.free, "used": self.total - self.free})

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        return self.capability


def use_driver(monkeypatch: pytest.MonkeyPatch, driver: FakeNvml | None) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(plan_machine, "nvidia_device_is_here", lambda: True)
    monkeypatch.setattr(plan_machine, "open_nvml", lambda: driver)


def test_this_machine_s_card_is_planned_for_with_what_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    total = 24_564 << 20
    use_driver(monkeypatch, FakeNvml("NVIDIA GeForce RTX 4090", (8, 9), total, total - 6 * GIB))
    report = made(f"{QWEN_7B} --quantization awq")
    assert report.subject.machine == "GeForce RTX 4090"
    assert report.geometry.room.total_bytes == int(23.64 * GIB)  # as CUDA sees it, not NVML
    left = report.geometry.room.total_bytes - (report.geometry.room.total_bytes - (total - 6 * GIB))
    assert report.fits.limit_bytes == left - plan_machine.CONTEXT_BYTES - (256 << 20)
    assert any("asks for" in note for note in report.subject.notes)


@pytest.mark.parametrize("driver", [None, FakeNvml("Tesla T4", (7, 5), 15 * GIB, 15 * GIB)])
def test_a_card_that_cannot_be_used_is_an_error_where_it_was_asked_for(
    driver: FakeNvml | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_driver(monkeypatch, driver)
    reason = "does not answer" if driver is None else "compute capability 7.5"
    report = made(QWEN_7B + " --quantization awq --parameters 1M")
    assert report.subject.machine.startswith("this CPU")
    assert any(reason in note for note in report.subject.notes)
    with pytest.raises(StartupError, match=f"^device cuda: .*{reason}.*--gpu NAME plans for a card that is not here"):
        made(f"{QWEN_7B} --device cuda")


# --------------------------------------------------------------------------- what is printed


def test_the_text_has_everything_that_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *QWEN_7B.split(), "--quantization", "awq", "--gpu", "rtx-4090", "--requests", "8x32K"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert not err
    assert max(len(line) for line in out.splitlines()) <= 80
    out = " ".join(out.split())
    for text in (
        "4 of 28 heads have keys and values (GQA), head_dim 128", "GiB on the card", "weights ",
        "activations ", "KV cache ", "57,344",
        "29,120", "28,672", "requests of 32,768 tokens", "largest max_model_len", "8 requests of 32,768 tokens fit",
        "--max-num-seqs ", "--max-model-len 39328", "the KV cache gets", "█",
    ):  # fmt: skip
        assert text in out, text


def test_what_does_not_fit_is_printed_with_the_reason_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *LLAMA31_70B.split(), "--gpu", "rtx-4090"]) == 1
    out, _ = capsys.readouterr()
    assert "does not fit: the weights need " in out
    assert "recommended" not in out
    assert main(["plan", *QWEN_7B.split(), "--quantization", "awq", "--gpu", "l4", "--requests", "500x32K"]) == 1
    assert "500 requests of 32,768 tokens do not fit" in capsys.readouterr()[0]


def test_requests_longer_than_what_is_served_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*f"plan {QWEN_7B} --quantization awq --gpu h100".split(), "--requests"]
    assert main([*words, "8x32K", "--max-model-len", "4096"]) == 1
    out = " ".join(capsys.readouterr()[0].split())
    assert "8 requests of 32,768 tokens do not fit: each is longer than max_model_len 4,096" in out
    assert "recommended: --max-model-len 39328" in out
    assert main([*words, "2x300K"]) == 1
    out = " ".join(capsys.readouterr()[0].split())
    assert "do not fit: each is longer than the model's 131,072 positions" in out
    assert "recommended" not in out
    assert main([*words, "64x2K", "--max-num-seqs", "8"]) == 0
    assert "max_num_seqs lets 8 of them run at once" in " ".join(capsys.readouterr()[0].split())


def test_json_needs_no_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stdout)
    for flags in (["--json"], []):
        assert plan.run([*QWEN_7B.split(), "--gpu", "h100", *flags], {}) == 0


def test_the_text_can_be_ascii() -> None:
    report = made(f"{QWEN_7B} --quantization awq --gpu l4")
    bars = [line for line in plan_text.lines(report, is_ascii=True) if "#" in line or "[W" in line]
    assert len(bars) > 3
    assert all(line.isascii() for line in bars)


def test_json_has_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{QWEN_7B} --quantization awq --gpu rtx-4090 --max-num-seqs 8 --kv-cache-dtype fp16"
    assert main(["plan", *words.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr()[0])
    report = made(words)
    assert found == json.loads(json.dumps(report.as_dict()))
    assert found["memory"]["kv_bytes"] == found["memory"]["num_blocks"] * found["memory"]["block_bytes"]
    assert found["settings"]["max_num_seqs"] == 8
    rows = {row["tokens"]: row for row in found["requests"]}
    assert rows[8192]["fp16"] == found["memory"]["num_blocks"] // 512
    assert rows[8192]["int8"] > rows[8192]["fp16"]


def test_the_chart_is_an_svg_file_of_the_same_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    words = f"{QWEN_7B} --quantization awq --gpu rtx-4090"
    assert plan.run([*words.split(), "--chart", str(path)], os.environ) == 0
    report = made(words)
    assert path.read_text(encoding="utf-8") == plan_picture.draw(report)
    texts = [element.text for element in ElementTree.parse(path).iter() if element.tag.endswith("text")]
    assert f"{report.fits.requests(8192):,}" in texts
    assert any(text and text.startswith("KV cache, int8 ") for text in texts)
    refused = made(f"{LLAMA31_70B} --gpu l4")
    ElementTree.fromstring(plan_picture.draw(replace(refused, subject=replace(refused.subject, model="a<b\x00&c"))))
    with pytest.raises(StartupError, match=r"--chart: .*no-folder/x\.svg: No such file"):
        plan.run([*words.split(), "--chart", str(tmp_path / "no-folder" / "x.svg")], os.environ)


def test_everything_that_is_refused_is_a_kvd_error(tmp_path: Path) -> None:
    with pytest.raises(KvdError, match="swap_space takes"):
        made(f"{QWEN_7B} --quantization awq --device cpu --memory 8GiB --swap-space 64")
    with pytest.raises(KvdError, match="quantization: awq is asked for"):
        plan_model.find_model(Config(model=str(make_llama(tmp_path / "m")), quantization="awq"), tmp_path)


# --------------------------------------------------------------------------- the document

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "sizing.md"
QWEN_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "float16",
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
}  # fmt: skip


def test_the_commands_of_the_document_are_understood() -> None:
    found = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("kvd plan")]
    assert len(found) >= 5
    for line in found:
        parse(line.partition("#")[0].split()[2:], {})


def test_the_table_of_the_document_is_computed() -> None:
    rows = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if re.match(r"\| [LQ].* × ", line)]
    assert len(rows) == 4
    for line in rows:
        _, _, shape, per_token, int8, whole, _ = (cell.strip() for cell in line.split("|"))
        layers, kv_heads, head_dim = (int(number) for number in shape.split(" × "))
        words = f"--layers {layers} --heads {kv_heads} --head-dim {head_dim} --memory 500GiB"
        found = made(words).as_dict()["bytes_per_token"]
        assert per_token == f"{found['fp16'] / KIB:g} KiB"
        assert int8 == f"{found['int8'] / KIB:.4g} KiB".replace("28.44", "28.4")
        num_bytes = found["fp16"] * 8192
        assert whole == (f"{num_bytes / GIB:g} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:g} MiB")


def test_the_picture_of_the_document_is_drawn_by_this_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("qwen2.5-7b-awq").mkdir()
    tmp_path.joinpath("qwen2.5-7b-awq", "config.json").write_text(json.dumps(QWEN_CONFIG))
    shown = plan_picture.draw(made("qwen2.5-7b-awq --gpu rtx-4090"))
    path = DOCUMENT.parent / "plan.svg"
    if os.environ.get("KVD_UPDATE_PICTURES"):
        path.write_text(shown, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == shown
