"""The configuration: values, sources, errors of one line, checks between settings."""

from __future__ import annotations

import dataclasses
import random
import string
from pathlib import Path
from typing import Any

import pytest

from kvd.config import SETTINGS, Config
from kvd.config_flags import parse_flags
from kvd.config_keys import ApiKey
from kvd.config_kinds import DiskCache, scaled_integer, size_in_bytes
from kvd.config_load import LoadedConfig, load_config, read_file
from kvd.config_vllm import FOREIGN_SETTINGS, NAMES_ELSEWHERE, SHORT_FLAGS
from kvd.errors import ConfigError

# The start command and the file of the texts that the project started from, with the program's name changed.
VLLM_COMMAND = (
    "Qwen/Qwen2.5-7B-Instruct-AWQ --max-model-len 32768 --gpu-memory-utilization 0.92 --kv-cache-dtype int8 "
    "--enable-prefix-caching --max-num-seqs 8 --swap-space 8 --tensor-parallel-size 1"
)
VLLM_FILE = """\
# vllm_config.yaml
model: Qwen/Qwen2.5-7B-Instruct
dtype: float16
max_model_len: 32768
gpu_memory_utilization: 0.90
max_num_seqs: 16
enable_prefix_caching: true
block_size: 16
swap_space: 8
num_gpu_blocks_override: null
"""


def from_flags(line: str, **environment: str) -> LoadedConfig:
    words = parse_flags(line.split())
    return load_config(words.config_path, words.entries, environment)


def from_text(folder: Path, text: str, flags: str = "", **environment: str) -> LoadedConfig:
    path = folder / "kvd.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, parse_flags(flags.split()).entries, environment)


def refusal(load: Any) -> str:
    """The message of the ConfigError that `load()` raises; always one line."""
    with pytest.raises(ConfigError) as caught:
        load()
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


# --------------------------------------------------------------------------- vLLM's files and commands


def test_a_vllm_start_command_works_as_it_is() -> None:
    loaded = from_flags(VLLM_COMMAND)
    assert loaded.config == Config(
        model="Qwen/Qwen2.5-7B-Instruct-AWQ",
        max_model_len=32768,
        gpu_memory_utilization=0.92,
        kv_cache_dtype="int8",
        max_num_seqs=8,
        swap_space=8.0,
    )
    notices = "\n".join(loaded.notices)
    assert len(loaded.notices) == 1
    assert "--tensor-parallel-size has no effect: kvd serves one GPU" in notices


def test_a_vllm_file_works_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "vllm_config.yaml").write_text(VLLM_FILE, encoding="utf-8")
    words = parse_flags(["--config", str(tmp_path / "vllm_config.yaml"), "--port", "8000"])
    loaded = load_config(words.config_path, words.entries)
    assert loaded.config == Config(
        model="Qwen/Qwen2.5-7B-Instruct", dtype="float16", max_model_len=32768, max_num_seqs=16, swap_space=8.0
    )
    assert loaded.origins["port"] == "--port"
    assert loaded.origins["swap_space"].endswith("vllm_config.yaml:9")


def test_the_container_command_of_the_texts_works() -> None:
    line = (
        "--model Qwen/Qwen2.5-7B-Instruct --max-model-len 32768 --gpu-memory-utilization 0.90 --max-num-seqs 16 "
        "--enable-prefix-caching --block-size 16"
    )
    assert from_flags(line).config.max_num_seqs == 16


def test_the_python_calls_of_the_texts_are_valid_keys(tmp_path: Path) -> None:
    text = "model: meta-llama/Llama-3.1-70B-Instruct\ngpu_memory_utilization: 0.9\nmax_model_len: 4096\n"
    assert from_text(tmp_path, text).config.max_model_len == 4096
    message = refusal(lambda: from_text(tmp_path, text + "tensor_parallel_size: 4\n"))
    assert message.endswith("kvd.yaml:4: tensor_parallel_size: '4' is refused: "
                            "kvd serves one GPU or the CPU (only 1 is accepted)")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "spelling", "value"),
    [
        ("dtype", "half", "float16"),
        ("dtype", "bfloat16", "bfloat16"),
        ("dtype", "float", "float32"),
        ("kv_cache_dtype", "int8_per_token_head", "int8"),
        ("kv_cache_dtype", "bfloat16", "bf16"),
        ("kv_cache_dtype", "float16", "fp16"),
        ("max_model_len", "32k", 32000),
        ("max_model_len", "32K", 32768),
        ("max_model_len", "25.6k", 25600),
        ("max_model_len", "-1", None),
        ("max_model_len", "auto", None),
        ("max_num_seqs", "auto", None),
        ("kv_cache_memory_bytes", "4GiB", 4 * 2**30),
        ("kv_cache_memory_bytes", "4G", 4 * 2**30),
        ("kv_cache_memory_bytes", "4GB", 4 * 10**9),
        ("kv_cache_memory_bytes", "1.5 GiB", 3 * 2**29),
        ("kv_cache_memory_bytes", "4096", 4096),
        ("gpu_memory_utilization", ".5", 0.5),
        ("swap_space", "4.0", 4.0),
        ("served_model_name", '["a", "b"]', ("a", "b")),
        ("allowed_origins", '["*"]', ("*",)),
        ("allowed_hosts", "a.example, b.example", ("a.example", "b.example")),
        ("dashboard", "off", False),
        ("dashboard", "auto", None),
        ("quantization", "awq_marlin", "awq"),
        ("tool_call_parser", "llama4_pythonic", "pythonic"),
        ("reasoning_parser", "qwen3", "think"),
    ],
)
def test_spellings(tmp_path: Path, name: str, spelling: str, value: object) -> None:
    assert getattr(from_text(tmp_path, f"{name}: {spelling!r}\n").config, name) == value
    if spelling != "auto" or name != "dashboard":  # on the command line, auto is to say nothing
        words = parse_flags([f"--{name}={spelling}"])
        assert getattr(load_config(flags=words.entries).config, name) == value


@pytest.mark.parametrize(
    "line",
    [
        "--enforce-eager", "--trust-remote-code", "--no-trust-remote-code", "-tp 1 -pp 1", "--disable-log-requests",
        "--uvicorn-log-level debug", "--enable-chunked-prefill", "--enable_chunked_prefill=True", "--cpu-offload-gb 0",
        "--pipeline_parallel_size=1", "--tokenizer smollm2-135m-instruct", "--load-format safetensors",
        "--enable-auto-tool-choice", "--distributed-executor-backend mp",
    ],
)  # fmt: skip
def test_settings_without_meaning_are_accepted_with_a_notice(line: str) -> None:
    loaded = from_flags(line)
    assert loaded.config == Config()
    assert len(loaded.notices) == sum(word.startswith("-") for word in line.split()) - line.count("--tokenizer")
    assert all("no effect" in notice for notice in loaded.notices)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--tensor-parallel-size 2", "kvd serves one GPU"),
        ("-tp 2", "kvd serves one GPU"),
        ("--no-enable-chunked-prefill", "in chunks"),
        ("--enable-chunked-prefill=false", "in chunks"),
        ("--cpu-offload-gb 4", "offloads none"),
        ("--enable-lora", "LoRA"),
        ("--speculative-config {}x", "speculate"),
        ("--ssl-keyfile key.pem", "reverse proxy"),
        ("--tokenizer other/model", "model's own files"),
        ("--download-dir /data", "KVD_HOME"),
        ("--kv-offloading-size 8", "swap_space"),
    ],
)
def test_settings_that_would_change_something_are_refused_with_the_reason(line: str, reason: str) -> None:
    message = refusal(lambda: from_flags(line))
    assert reason in message
    assert "refused" in message


def test_nested_settings_of_vllm_are_read(tmp_path: Path) -> None:
    loaded = from_text(tmp_path, "compilation_config: {level: 3, cudagraph: {sizes: [1, 2]}}\nlora_modules: []\n")
    assert len(loaded.notices) == 2
    assert "speculate" in refusal(lambda: from_text(tmp_path, "speculative_config: {method: {name: ngram}}\n"))


def test_no_name_is_both_ours_and_foreign() -> None:
    assert not set(FOREIGN_SETTINGS) & set(SETTINGS)
    assert set(SHORT_FLAGS.values()) <= {*FOREIGN_SETTINGS, *SETTINGS}
    assert set(NAMES_ELSEWHERE.values()) <= set(SETTINGS)
    assert not set(NAMES_ELSEWHERE) & {*FOREIGN_SETTINGS, *SETTINGS}


# --------------------------------------------------------------------------- sources


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    text = "api_key: from-file\nhome: /from-file\nport: 1\n"
    assert from_text(tmp_path, "").config.api_key == ()
    assert from_text(tmp_path, text).config.api_key == (ApiKey("key 1", "from-file"),)
    environment = {"KVD_API_KEY": "from-environment", "KVD_HOME": "/from-environment"}
    loaded = from_text(tmp_path, text, **environment)
    assert loaded.config.api_key == (ApiKey("key 1", "from-environment"),)
    assert loaded.config.home_path == Path("/from-environment")
    loaded = from_text(tmp_path, text, "--api-key from-flag --port 2", **environment)
    assert (loaded.config.api_key, loaded.config.port) == ((ApiKey("key 1", "from-flag"),), 2)
    assert loaded.origins["home"] == "KVD_HOME"


def test_a_value_is_checked_even_where_a_flag_overrides_it(tmp_path: Path) -> None:
    assert "port" in refusal(lambda: from_text(tmp_path, "port: many\n", "--port 2"))


def test_an_empty_environment_variable_says_nothing() -> None:
    assert from_flags("", KVD_API_KEY="", KVD_HOME="").config == Config()


def test_null_means_the_default(tmp_path: Path) -> None:
    text = "".join(f"{name}: null\n" for name in SETTINGS)
    loaded = from_text(tmp_path, text)
    assert loaded.config == Config()
    assert not loaded.notices


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "null\n", "\ufeff# a byte order mark\n"])
def test_an_empty_file_is_all_defaults(tmp_path: Path, text: str) -> None:
    assert from_text(tmp_path, text).config == Config()


def test_hyphens_and_underscores_are_equal(tmp_path: Path) -> None:
    assert from_text(tmp_path, "max-model-len: 4096\n").config.max_model_len == 4096
    assert from_flags("--max_model_len 4096").config.max_model_len == 4096
    assert from_flags("--max_model_len=4096").config.max_model_len == 4096


def test_booleans_are_bare_negated_or_written_out() -> None:
    assert from_flags("--enable-prefix-caching").config.enable_prefix_caching
    assert not from_flags("--no-enable-prefix-caching").config.enable_prefix_caching
    assert not from_flags("--enable_prefix_caching=False").config.enable_prefix_caching
    assert not from_flags("--no-dashboard").config.dashboard
    assert from_flags("--dashboard model-name").config.model == "model-name"


def test_the_model_may_stand_alone() -> None:
    assert from_flags("org/name --port 1").config.model == "org/name"
    assert from_flags("--port 1 org/name").config.model == "org/name"
    assert from_flags("org/name --model org/name").config.model == "org/name"
    assert "two models" in refusal(lambda: from_flags("one --model two"))
    assert "unexpected argument 'two'" in refusal(lambda: from_flags("one two"))


def test_texts_stay_as_they_are_written(tmp_path: Path) -> None:
    """YAML would read these as an octal number, a boolean and a float."""
    assert from_text(tmp_path, "api_key: 0123\n").config.api_key == (ApiKey("key 1", "0123"),)
    assert from_text(tmp_path, "served_model_name: [on, 1e3]\n").config.served_model_name == ("on", "1e3")


def test_the_nested_key(tmp_path: Path) -> None:
    cache = DiskCache("/var/cache/kvd", 20 * 2**30)
    assert from_text(tmp_path, "disk_cache:\n  path: /var/cache/kvd\n  size: 20GiB\n").config.disk_cache == cache
    assert from_flags("--disk-cache path=/var/cache/kvd,size=20GiB").config.disk_cache == cache
    for bad in ("path=/x", "size=1GiB", "path=/x,size=much", "path=/x,size=1GiB,level=3", "/x", "path=,size=1GiB"):
        assert "path and size" in refusal(lambda bad=bad: from_flags(f"--disk-cache {bad}"))
    assert "kvd.yaml:1: disk_cache" in refusal(lambda: from_text(tmp_path, "disk_cache: {path: /x, sise: 1GiB}\n"))
    assert "kvd.yaml:1: disk_cache" in refusal(lambda: from_text(tmp_path, "disk_cache: {path: [a], size: 1GiB}\n"))


# --------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port: 8000\nmax_modle_len: 1\n", "kvd.yaml:2: unknown key 'max_modle_len'; did you mean max_model_len?"),
        ("ctx_size: 1\n", "kvd.yaml:1: unknown key 'ctx_size'; did you mean max_model_len?"),
        ("zzz: 1\n", "kvd.yaml:1: unknown key 'zzz'"),
        ("tensor_paralel_size: 1\n", "did you mean tensor_parallel_size?"),
        ("kv_cache_dtype: int9\n", "kvd.yaml:1: kv_cache_dtype: expected one of auto, int8, fp16, bf16, fp8_e4m3, "
                                   "fp8_e5m2, got 'int9'; did you mean int8?"),
        ("max_num_seqs: 0\n", "kvd.yaml:1: max_num_seqs: expected a whole number from 1 to 4,096 or auto, got '0'"),
        ("max_num_seqs: 8.5\n", "got '8.5'"),
        ("max_num_seqs: [8]\n", "max_num_seqs: expected a whole number from 1 to 4,096 or auto, not a list"),
        ("gpu_memory_utilization: 1.5\n", "expected a number > 0 and ≤ 1, got '1.5'"),
        ("gpu_memory_utilization: 0\n", "expected a number > 0 and ≤ 1"),
        ("gpu_memory_utilization: .nan\n", "expected a number > 0 and ≤ 1"),
        ("drain_timeout: .inf\n", "expected a number"),
        ("enable_prefix_caching: maybe\n", "expected true or false, got 'maybe'"),
        ("port: 8000\nport: 9000\n", "kvd.yaml:2: port is already set in line 1"),
        ("max-model-len: 1K\nmax_model_len: 2K\n", "kvd.yaml:2: max_model_len is already set in line 1"),
        ("- port\n", "kvd.yaml:1: expected lines of the form `key: value`"),
        ("just a text\n", "kvd.yaml:1: expected lines of the form `key: value`"),
        ("port: 1\n\tmodel: x\n", "kvd.yaml:2: not valid YAML: a tab stands where YAML wants spaces"),
        ("model: 'x\n", "not valid YAML"),
        ("port: 1\n---\nport: 2\n", "not valid YAML"),
        ("port: {\n", "not valid YAML"),
        ("? [a]\n: 1\n", "expected the name of a setting"),
        ("model: ''\n", "kvd.yaml:1: model: expected"),
        ("<<: {port: 1}\n", "unknown key '<<'"),
        ("host: {a: 1}\n", "kvd.yaml:1: host: expected a host name or an address, not a mapping"),
        ("served_model_name: [a, null]\n", "kvd.yaml:1: served_model_name: expected"),
        ("served_model_name: [a, [b]]\n", "kvd.yaml:1: served_model_name: expected"),
        ("block_size: 32\n", "kvd.yaml:1: block_size: 32 is refused: kvd's kernels"),
        ("model: &a x\nrevision: *b\n", "not valid YAML"),
        ("x" * 200 + ": 1\n", "…"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(lambda: from_text(tmp_path, text))


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    assert refusal(lambda: load_config(missing)) == f"{missing}: no such file"
    assert str(tmp_path) in refusal(lambda: load_config(tmp_path))
    path = tmp_path / "kvd.yaml"
    path.write_bytes(b"port: 1\nmodel: \xff\n")
    assert refusal(lambda: load_config(path)) == f"{path}:2: not UTF-8 text"
    path.write_bytes(b"#" * (2**20 + 1))
    assert "larger than 1 MiB" in refusal(lambda: load_config(path))
    path.write_text("model: " + "[" * 1_000)
    assert refusal(lambda: load_config(path)) == f"{path}: nested too deeply"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--max-modle-len 1", "--max-modle-len: unknown flag; did you mean --max-model-len?"),
        ("--ctx_size=1", "--ctx-size: unknown flag; did you mean --max-model-len?"),
        ("--port", "--port: expected one argument"),
        ("--port abc", "--port: expected a whole number from 0 to 65,535, got 'abc'"),
        ("--port 65536", "--port: expected a whole number"),
        ("--port 1_000", "--port: expected a whole number"),
        ("--insecure=perhaps", "--insecure: expected true or false, got 'perhaps'"),
        ("--max-model-len 1.5K", "--max-model-len: expected"),
        ("--max-model-len 8", "--max-model-len: expected a whole number ≥ 16 or auto, got '8'"),
        ("--por 1", "--por: unknown flag; did you mean --port?"),
    ],
)
def test_a_bad_flag_is_one_line(line: str, expected: str) -> None:
    assert expected in refusal(lambda: from_flags(line))


def test_a_bad_environment_variable_is_named() -> None:
    assert refusal(lambda: from_flags("", KVD_API_KEY="two words")).startswith("KVD_API_KEY: ")


# --------------------------------------------------------------------------- checks between settings


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_a_reachable_host_needs_a_key_or_consent(host: str) -> None:
    message = refusal(lambda: from_flags(f"--host {host}"))
    assert "--api-key KEY" in message
    assert "--insecure" in message
    assert from_flags(f"--host {host} --insecure").config.host == host
    assert from_flags(f"--host {host} --api-key secret").config.host == host
    assert from_flags(f"--host {host}", KVD_API_KEY="secret").config.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "kvd.localhost"])
def test_a_loopback_host_needs_nothing(host: str) -> None:
    assert from_flags(f"--host {host}").config.host == host


@pytest.mark.parametrize("key", [" secret", "secret ", "secret\t", "se cret", "schlüssel"])
def test_a_key_that_no_client_could_send_is_refused_and_not_shown(tmp_path: Path, key: str) -> None:
    message = refusal(lambda: from_text(tmp_path, f"api_key: '{key}'\n"))
    assert "api_key" in message
    assert key.strip() not in message


def test_stray_blanks_in_a_key_are_named() -> None:
    assert "begins or ends with a blank" in refusal(lambda: from_flags("", KVD_API_KEY="secret\n"))


@pytest.mark.parametrize("spelling", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("chosen", ["--device cpu", "--backend cpu", "--backend reference"])
def test_fp8_is_refused_on_the_cpu_with_the_reason(spelling: str, chosen: str) -> None:
    message = refusal(lambda: from_flags(f"--kv-cache-dtype {spelling} {chosen}"))
    assert "no fp8 arithmetic" in message
    assert "int8" in message
    assert from_flags(f"--kv-cache-dtype {spelling} --device cuda").config.kv_cache_dtype.startswith("fp8")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--device cuda --backend cpu", "exclude each other"),
        ("--device cuda --backend reference", "exclude each other"),
        ("--device cpu --backend triton", "exclude each other"),
        ("--device cuda --dtype float32", "float32 is refused on the GPU"),
        ("--backend triton --dtype float", "float32 is refused on the GPU"),
    ],
)
def test_a_device_and_what_it_does_not_have_exclude_each_other(flags: str, reason: str) -> None:
    assert reason in refusal(lambda: from_flags(flags))
    first, _ = flags.split(" --")
    assert not from_flags(first).notices


def test_fewer_batched_tokens_than_requests_are_refused() -> None:
    assert "max_num_seqs" in refusal(lambda: from_flags("--max-num-batched-tokens 16 --max-num-seqs 17"))
    assert from_flags("--max-num-batched-tokens 17 --max-num-seqs 17").config.max_num_seqs == 17


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("--served-model-name a a", "the same name"),
        ("--chat-template /no/such/file", "no such file"),
        ("--allowed-origins example.org", "scheme://host"),
        ("--allowed-origins https://example.org/path", "scheme://host"),
        ("--allowed-hosts http://example.org", "host name without scheme"),
    ],
)
def test_lists_and_files_are_checked(line: str, name: str) -> None:
    assert name in refusal(lambda: from_flags(line))


def test_a_chat_template_may_be_a_file_or_the_template(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    assert from_flags(f"--chat-template {template}").config.chat_template == str(template)
    assert from_flags("--chat-template {{messages}}").config.chat_template == "{{messages}}"


def test_what_has_no_effect_yet_is_announced() -> None:
    (notice,) = from_flags("--head-quantization int8").notices
    assert notice == "--head-quantization has no effect in this version"


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--swap-space 8", "swap_space", 8.0),
        ("--disk-cache path=/x,size=1GiB", "disk_cache", DiskCache("/x", 2**30)),
        ("--kv-eviction streaming", "kv_eviction", "streaming"),
        ("--kv-eviction-tokens 1K", "kv_eviction_tokens", 1024),
        ("--kv-eviction-tokens 64", "kv_eviction_tokens", 64),
        ("--max-cached-tokens 0", "max_cached_tokens", 0),
        ("--cache-eviction lru", "cache_eviction", "lru"),
        ("--keep-tool-turns 0", "keep_tool_turns", 0.0),
        ("--target-itl-ms 50", "target_itl_ms", 50.0),
    ],
)
def test_settings_of_cache_and_scheduler_are_taken_as_they_are(line: str, name: str, value: object) -> None:
    loaded = from_flags(line)
    assert getattr(loaded.config, name) == value
    assert not loaded.notices


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--kv-eviction-tokens 63", "--kv-eviction-tokens: expected a whole number ≥ 64"),
        ("--kv-eviction window", "--kv-eviction: expected one of none, sliding_window, streaming, heavy_hitter"),
        ("--cache-eviction fifo", "--cache-eviction: expected one of value, lru"),
        ("--target-itl-ms -1", "--target-itl-ms: expected a number ≥ 0"),
        ("--swap-space 4GiB", "--swap-space: expected a number ≥ 0"),
    ],
)
def test_values_that_cache_and_scheduler_cannot_use_are_refused(line: str, expected: str) -> None:
    assert refusal(lambda: from_flags(line)).startswith(expected)


def test_the_target_gap_has_a_default_and_can_be_switched_off() -> None:
    assert Config().target_gap_seconds == 0.25
    assert from_flags("--target-itl-ms 40").config.target_gap_seconds == 0.04
    assert from_flags("--target-itl-ms 0").config.target_gap_seconds is None


def test_settings_that_need_prefix_caching_are_announced_without_it() -> None:
    line = "--no-enable-prefix-caching --disk-cache path=/x,size=1GiB --swap-space 1 --keep-tool-turns 9"
    assert from_flags(line).notices == (
        "--disk-cache has no effect without enable_prefix_caching",
        "--keep-tool-turns has no effect without enable_prefix_caching",
    )


def test_sizes_that_override_each_other_are_announced() -> None:
    notices = from_flags("--kv-cache-memory-bytes 1GiB --num-gpu-blocks-override 9").notices
    assert notices == ("--kv-cache-memory-bytes has no effect beside num_gpu_blocks_override",)
    assert len(from_flags("--kv-cache-memory-bytes 1GiB --cpu-memory-utilization 0.5").notices) == 1


# --------------------------------------------------------------------------- the table itself


def test_defaults_are_valid_values_and_show_as_themselves(tmp_path: Path) -> None:
    for name, setting in SETTINGS.items():
        loaded = from_text(tmp_path, f"{name}: {setting.show(setting.default)}\n")
        assert getattr(loaded.config, name) == setting.default
        assert not loaded.notices


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "/a b/c: d#e"), ("model", "yes"), ("model", 'quote"s\\'), ("model", "Qwen/Qwen2.5-7B"),
        ("served_model_name", ("a", "null", "c, d")), ("served_model_name", ("[x]",)),
        ("gpu_memory_utilization", 0.123456789), ("drain_timeout", 1e7), ("kv_cache_memory_bytes", 2**33),
        ("kv_cache_memory_bytes", 12345), ("disk_cache", DiskCache("/x y/z", 2**40)), ("dashboard", False),
        ("max_model_len", 131072), ("seed", 2**63 - 1),
    ],
)  # fmt: skip
def test_every_value_reads_back_as_shown(tmp_path: Path, name: str, value: object) -> None:
    loaded = from_text(tmp_path, f"{name}: {SETTINGS[name].show(value)}\n")
    assert getattr(loaded.config, name) == value


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().port = 1  # type: ignore[misc]


def test_served_names_default_to_the_model() -> None:
    assert Config(model="a/b").served_names == ("a/b",)
    assert Config(served_model_name=("x", "y")).served_names == ("x", "y")


@pytest.mark.parametrize("text", ["", "k", "1kk", "1 k", "1.5K", "0x10", "1e3", "²", "1_0", "١", "--1"])
def test_what_is_no_number_is_none(text: str) -> None:
    assert scaled_integer(text) is None


@pytest.mark.parametrize("text", ["GiB", "1 Gi", "1GiBs", "-1GiB", "1..5GiB", "1e3MB"])
def test_what_is_no_size_is_none(text: str) -> None:
    assert size_in_bytes(text) is None


@pytest.mark.full
def test_no_text_whatever_gets_past_the_one_line_error(tmp_path: Path) -> None:
    """Mutated files and command lines end in a configuration or in a ConfigError of one line."""
    generator = random.Random(7)
    alphabet = string.printable + "äß\u2028\x00\x1b😀"
    sample = (Path(__file__).parent.parent / "kvd.yaml").read_text(encoding="utf-8")
    seeds = [VLLM_FILE, sample[:800], "disk_cache: {path: /x, size: 1GiB}\n", "port: 1\n"]
    path = tmp_path / "fuzz.yaml"
    for _ in range(3_000):
        text = list(generator.choice(seeds))
        for _ in range(generator.randint(1, 6)):
            where = generator.randrange(len(text) + 1)
            text[where : where + generator.randint(0, 3)] = generator.choices(alphabet, k=generator.randint(0, 3))
        path.write_text("".join(text), encoding="utf-8", errors="surrogatepass")
        words = ["".join(generator.choices(alphabet + "--==", k=generator.randint(1, 12))) for _ in range(3)]
        words[0] = "--" + generator.choice(list(SETTINGS)).replace("_", "-") + generator.choice(["", "=1", "=x"])
        for load in (lambda: load_config(path), lambda words=words: load_config(flags=parse_flags(words).entries)):
            message = "fine"
            try:
                load()
            except ConfigError as error:
                message = str(error)
            assert len(message.splitlines()) == 1, message


def test_reading_a_file_keeps_its_order_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("\nport: 1\n\nhost: a\n")
    assert [(entry.name, entry.origin) for entry in read_file(path)] == [("port", f"{path}:2"), ("host", f"{path}:4")]
