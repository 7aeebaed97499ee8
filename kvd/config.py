"""The configuration: one frozen value, whose fields are the only table of settings.

Purpose: every key of kvd.yaml, every flag, the tables in `docs/` and the sample file are generated from the
fields of `Config`: name, type, default, section, kind of value, help text. Owner: `config_load` makes it once
at start; everybody reads it. Invariant: a `Config` made by `config_load` has passed every check that needs no
model; `Config()` is what an empty file means. Importing this needs the standard library alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvd.config_fields import Setting, setting, table
from kvd.config_kinds import (
    Boolean,
    Choice,
    DiskCache,
    DiskCacheKind,
    Integer,
    Number,
    Size,
    Text,
    TextList,
)
from kvd.config_server import ServerConfig

DEFAULT_MODEL = "smollm2-135m-instruct"

_FLOAT_NAMES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}
_KV_NAMES = {
    "int8_per_token_head": "int8",
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "fp8": "fp8_e4m3",
}
_TOOL_PARSER_NAMES = {
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
}
_REASONING_PARSER_NAMES = {
    "deepseek_r1": "think",
    "qwen3": "think",
}
_MAX_COUNT = 2**40
MIN_KV_EVICTION_TOKENS = 64
"""What a request that forgets tokens holds at least: a block of first tokens, one to forget, and the two newest."""
NOT_YET = "in this version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ServerConfig):
    """Everything that can be set. Sizes are in bytes, durations in seconds, unless a name says otherwise."""

    # ------------------------------------------------------------------ Model
    model: str = setting(
        DEFAULT_MODEL,
        Text("a directory, a .gguf file, a name that `kvd models` lists, or a hub id", is_path=True),
        "Model",
        "What to serve: a directory, a .gguf file, a name that `kvd models` lists, or a hub id `org/name`. "
        "The command line also takes it without the flag.",
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        TextList("a name or a list of names"),
        "Model",
        "The name, or names, that clients ask for; the first one is reported back.",
        null_means="the model as it was given",
    )
    revision: str | None = setting(
        None,
        Text("a branch, tag or commit"),
        "Model",
        "Branch, tag or commit of a hub model.",
        null_means="the hub's main branch",
    )
    dtype: str = setting(
        "auto",
        Choice(("auto", "float16", "bfloat16", "float32"), _FLOAT_NAMES),
        "Model",
        "Element type of activations on the GPU: float16 or bfloat16; auto is bfloat16 where the checkpoint says so, "
        "else float16. The CPU computes with 8-bit activations and 32-bit sums.",
    )
    quantization: str = setting(
        "auto",
        Choice(("auto", "awq", "gguf", "none"), {"awq_marlin": "awq"}),
        "Model",
        "Quantization that the checkpoint must have; auto takes whatever it has.",
    )
    head_quantization: str = setting(
        "auto",
        Choice(("auto", "int8", "none")),
        "Model",
        "Format of an output head that the checkpoint leaves in 16 bits.",
        origin="kvd",
        no_effect=NOT_YET,
    )
    chat_template: str | None = setting(
        None,
        Text("a file with a Jinja chat template, or the template itself", is_path=True),
        "Model",
        "A file with a Jinja chat template, or the template itself, to use in place of the model's own.",
        null_means="the model's own",
    )
    tool_call_parser: str = setting(
        "auto",
        Choice(("auto", "none", "hermes", "llama3_json", "mistral", "pythonic"), _TOOL_PARSER_NAMES),
        "Model",
        "How the model writes tool calls; auto goes by its chat template, and where that knows none, describes tools "
        "and calls in hermes form. With none, requests with tools are refused.",
    )
    reasoning_parser: str = setting(
        "auto",
        Choice(("auto", "none", "think"), _REASONING_PARSER_NAMES),
        "Model",
        "How the model marks its reasoning: think is `<think>…</think>`; auto is that where the chat template speaks "
        "of it. With none, reasoning is part of the answer.",
    )
    seed: int | None = setting(
        None,
        Integer(0, 2**63 - 1, has_auto=True),
        "Model",
        "Where the seeds of requests without one come from; with a number, the same sequence of requests "
        "gets the same seeds again.",
    )

    # ------------------------------------------------------------------ Memory
    max_model_len: int | None = setting(
        None,
        Integer(16, _MAX_COUNT, has_auto=True),
        "Memory",
        "Longest context of one request in tokens, prompt and answer together: 32768, or 32K as in vLLM; auto "
        "is the model's maximum, or what fits.",
    )
    gpu_memory_utilization: float = setting(
        0.9,
        Number(0, 1, open_below=True),
        "Memory",
        "On the GPU: share of its memory that kvd may take: weights, activations, graphs and KV cache together. Less "
        "where other processes hold more than the rest.",
    )
    cpu_memory_utilization: float = setting(
        0.3,
        Number(0, 1, open_below=True),
        "Memory",
        "On the CPU: share of the free RAM, after loading the weights, that the KV cache takes.",
        origin="kvd",
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        Size(),
        "Memory",
        "Exact size of the KV cache, such as 4GiB; overrides both shares above.",
        null_means="the share above decides",
    )
    num_gpu_blocks_override: int | None = setting(
        None,
        Integer(1, _MAX_COUNT),
        "Memory",
        "Exact number of KV blocks, on the CPU too; overrides every size above.",
        null_means="sized by memory",
    )
    kv_cache_dtype: str = setting(
        "auto",
        Choice(("auto", "int8", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"), _KV_NAMES),
        "Memory",
        "Element type of the KV cache; auto is int8 with one scale per token and head, and the remedies that "
        "the model needs. fp8 needs the GPU.",
    )
    block_size: int = setting(
        16,
        Integer(1, 2**20),
        "Memory",
        "Tokens per KV block. Only 16: kernels, cache keys and files on disk are built on it.",
    )
    cpu_threads: int | None = setting(
        None,
        Integer(1, 4096, has_auto=True),
        "Memory",
        "Threads that compute on the CPU; auto is one per physical core that this process may use, or less where a "
        "control group grants less time.",
        origin="kvd",
    )
    device: str = setting(
        "auto",
        Choice(("auto", "cpu", "cuda")),
        "Memory",
        "Where to compute; auto is the GPU where there is one that kvd has kernels for, else the CPU. One that is "
        "asked for by name and cannot be used is an error.",
    )
    backend: str = setting(
        "auto",
        Choice(("auto", "triton", "cpu", "reference")),
        "Memory",
        "Implementation of the numeric operations: triton runs on the GPU, cpu is native code, reference plain torch "
        "on the CPU and many times slower. One that is asked for by name and cannot run is an error.",
        origin="kvd",
    )

    # ------------------------------------------------------------------ Cache
    enable_prefix_caching: bool = setting(
        True,
        Boolean(),
        "Cache",
        "Keep finished KV blocks and reuse them for requests that begin with the same tokens.",
    )
    max_cached_tokens: int | None = setting(
        None,
        Integer(0, _MAX_COUNT),
        "Cache",
        "Most tokens to keep cached for reuse beside those in use.",
        null_means="no limit but the memory",
        origin="kvd",
    )
    cache_eviction: str = setting(
        "value",
        Choice(("value", "lru")),
        "Cache",
        "Which cached block leaves first when room is needed: value weighs the chance of reuse and the cost of "
        "computing it again, lru takes the one that was used longest ago.",
        origin="kvd",
    )
    swap_space: float = setting(
        0.0,
        Number(0, 2**20),
        "Cache",
        "GiB of RAM for copies of KV blocks, so that what left the KV cache comes back without being computed "
        "again, preempted requests too; 0 is none.",
    )
    disk_cache: DiskCache | None = setting(  # noqa: RUF009
        None,
        DiskCacheKind(),
        "Cache",
        "A folder, and the most it may hold, for KV blocks that should survive a restart. Blocks pass through "
        "swap_space; without one a small staging area is made.",
        null_means="none",
        origin="kvd",
    )
    kv_eviction: str = setting(
        "none",
        Choice(("none", "sliding_window", "streaming", "heavy_hitter")),
        "Cache",
        "Which tokens a request forgets to go on when it outgrows kv_eviction_tokens; none forgets nothing and ends "
        "it where the KV cache ends. Forgetting changes answers, and lets max_model_len exceed the KV cache. A "
        "request may choose for itself.",
        origin="kvd",
    )
    kv_eviction_tokens: int | None = setting(
        None,
        Integer(MIN_KV_EVICTION_TOKENS, _MAX_COUNT),
        "Cache",
        "Most tokens that one request with kv_eviction holds; a request may choose for itself.",
        null_means="as many as the KV cache holds",
        origin="kvd",
    )
    keep_tool_turns: float = setting(
        60.0,
        Number(0, 10**7),
        "Cache",
        "Seconds for which the blocks of a turn that ended in a tool call are kept, since the next turn is near; "
        "0 treats them like others.",
        origin="kvd",
    )

    # ------------------------------------------------------------------ Scheduling
    max_num_seqs: int | None = setting(
        None,
        Integer(1, 4096, has_auto=True),
        "Scheduling",
        "Most requests that run at the same time; the others wait. auto is a ceiling that kvd lowers while more "
        "requests at a time do not raise the throughput.",
    )
    max_num_batched_tokens: int | None = setting(
        None,
        Integer(16, 2**20, has_auto=True),
        "Scheduling",
        "Most tokens that one step computes; longer prompts take several steps, and target_itl_ms may make steps "
        "smaller. auto is the backend's choice: more on the GPU.",
    )
    target_itl_ms: float = setting(
        250.0,
        Number(0, 60_000),
        "Scheduling",
        "Gap between two tokens of a stream, in milliseconds, that other requests' prompts should not exceed: while "
        "somebody streams, a step computes no more of them than fits. 0 is no target.",
        origin="kvd",
    )
    max_waiting: int = setting(
        256,
        Integer(0, 10**6),
        "Scheduling",
        "Most requests that wait for their turn; more are refused with 503.",
        origin="kvd",
    )
    queue_timeout: float | None = setting(
        None,
        Number(0, 10**7, open_below=True),
        "Scheduling",
        "Seconds that a request may wait for its turn before it is refused.",
        null_means="no limit",
        origin="kvd",
    )
    drain_timeout: float = setting(
        30.0,
        Number(0, 10**7),
        "Scheduling",
        "Seconds that running requests get to finish after a first SIGINT or SIGTERM.",
        origin="kvd",
    )

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that clients may ask for; never empty."""
        return self.served_model_name or (self.model,)

    @property
    def target_gap_seconds(self) -> float | None:
        """`target_itl_ms` in seconds; None without a target."""
        return self.target_itl_ms / 1000 if self.target_itl_ms else None


SECTIONS: tuple[str, ...] = ("Model", "Memory", "Cache", "Scheduling", "Server")

SETTINGS: dict[str, Setting] = dict(
    sorted(table(Config).items(), key=lambda item: SECTIONS.index(item[1].section))  # inherited fields come first
)
"""Every setting by name, section by section, in the order of declaration."""
