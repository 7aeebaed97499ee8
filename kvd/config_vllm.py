"""vLLM's settings that have no meaning in kvd, and names that other servers use for ours.

Purpose: a vLLM file or start command works as it is. A setting listed here is accepted with one notice at a
value that changes nothing, and refused with the reason at any other. Names are those of vLLM's engine and
server arguments, older ones included. Invariant: no name is also a setting of `Config` (tested).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvd.config_kinds import RawValue


@dataclass(frozen=True, slots=True)
class ForeignSetting:
    """A key of vLLM's.

    harmless   values that change nothing, in lower case; None: whatever the value, nothing is lost
    reason     one clause that says why kvd has no such setting
    is_switch  the flag is a bare one
    """

    harmless: frozenset[str] | None
    reason: str
    is_switch: bool = False

    def accepts(self, raw: RawValue) -> bool:
        """Whether `raw` changes nothing; an empty list or mapping never does."""
        if self.harmless is None or not raw:
            return True
        return isinstance(raw, str) and raw.strip().lower() in self.harmless


_ONE_GPU = "kvd serves one GPU or the CPU"
_ONE_MACHINE = "kvd is one process on one machine"
_TEXT_ONLY = "kvd serves text models"
_NO_LORA = "kvd serves no LoRA adapters"
_NO_TLS = "kvd speaks plain HTTP; put a reverse proxy in front of it"
_NO_PLUGINS = "kvd loads no foreign code"
_NO_CUDA_GRAPH_CHOICE = "kvd chooses by itself how to launch a step"
_NO_SPECULATION = "kvd does not speculate"
_NO_TRACING = "kvd exports Prometheus metrics instead"
_NO_TRANSFER = "kvd moves its KV cache to no other server"
_OWN_LOADER = "kvd has its own loader"
_OWN_TEMPLATE = "kvd reads messages in both forms"
_OWN_HTTP = "kvd has its own HTTP server"
_OWN_LOG = "kvd logs at log_level"
_OWN_SCHEDULER = "kvd has its own scheduler"
_FROM_MODEL = "kvd takes it from the model's own files"
_SHAPE = "kvd serves a model with the shape that its own files state"
_PARSERS = "kvd chooses parsers by the model"

_OFF = frozenset({"false", "no", "off", "0"})
_ON = frozenset({"true", "yes", "on", "1"})


def _group(
    reason: str, harmless: frozenset[str] | None, names: str, *, is_switch: bool = False
) -> dict[str, ForeignSetting]:
    return {name: ForeignSetting(harmless, reason, is_switch) for name in names.split()}


FOREIGN_SETTINGS: dict[str, ForeignSetting] = {
    # one GPU, one machine
    **_group(
        _ONE_GPU,
        frozenset({"1"}),
        "tensor_parallel_size pipeline_parallel_size data_parallel_size data_parallel_size_local "
        "prefill_context_parallel_size decode_context_parallel_size",
    ),
    **_group(_ONE_MACHINE, frozenset({"1"}), "nnodes api_server_count"),
    **_group(_ONE_MACHINE, frozenset({"0"}), "node_rank data_parallel_rank data_parallel_start_rank"),
    **_group(
        _ONE_MACHINE,
        None,
        "master_addr master_port data_parallel_address data_parallel_rpc_port data_parallel_backend "
        "distributed_executor_backend max_parallel_loading_workers worker_cls worker_extension_cls "
        "all2all_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size",
    ),
    **_group(
        _ONE_MACHINE,
        None,
        "worker_use_ray engine_use_ray ray_workers_use_nsight disable_custom_all_reduce "
        "disable_nccl_for_dp_synchronization disable_frontend_multiprocessing",
        is_switch=True,
    ),
    **_group(
        _ONE_MACHINE,
        _OFF,
        "headless enable_expert_parallel enable_eplb enable_dbo data_parallel_hybrid_lb "
        "data_parallel_external_lb enable_sleep_mode enable_fault_tolerance",
        is_switch=True,
    ),
    # how a step is launched
    **_group(
        _NO_CUDA_GRAPH_CHOICE,
        None,
        "enforce_eager async_scheduling disable_async_output_proc disable_cascade_attn",
        is_switch=True,
    ),
    **_group(
        _NO_CUDA_GRAPH_CHOICE,
        None,
        "compilation_config optimization_level attention_config attention_backend max_seq_len_to_capture "
        "max_context_len_to_capture cudagraph_capture_sizes max_cudagraph_capture_size",
    ),
    # memory
    "cpu_offload_gb": ForeignSetting(frozenset({"0", "0.0"}), "kvd keeps all weights in one memory and offloads none"),
    "kv_offloading_size": ForeignSetting(frozenset({"0", "0.0"}), "kvd's setting for this is swap_space, in GiB"),
    "kv_offloading_backend": ForeignSetting(None, "kvd's setting for this is swap_space"),
    "calculate_kv_scales": ForeignSetting(
        None, "kvd computes the scales of the KV cache for every token and head", is_switch=True
    ),
    "prefix_caching_hash_algo": ForeignSetting(None, "kvd has one kind of block key, of 128 bits"),
    "kv_sharing_fast_prefill": ForeignSetting(_OFF, "kvd always computes all layers", is_switch=True),
    "disable_sliding_window": ForeignSetting(_OFF, _SHAPE, is_switch=True),
    "disable_hybrid_kv_cache_manager": ForeignSetting(
        _OFF, "kvd keeps layers of different windows in pools of their own", is_switch=True
    ),
    "use_v2_block_manager": ForeignSetting(None, "kvd has one block manager", is_switch=True),
    "preemption_mode": ForeignSetting(None, "kvd chooses the cheapest way by itself"),
    # scheduling
    "enable_chunked_prefill": ForeignSetting(_ON, "kvd always computes long prompts in chunks", is_switch=True),
    **_group(
        _OWN_SCHEDULER,
        None,
        "scheduling_policy num_lookahead_slots num_scheduler_steps scheduler_delay_factor stream_interval "
        "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold",
    ),
    **_group(_OWN_SCHEDULER, None, "multi_step_stream_outputs disable_chunked_mm_input", is_switch=True),
    "scheduler_cls": ForeignSetting(frozenset(), _OWN_SCHEDULER),
    # the model
    "trust_remote_code": ForeignSetting(None, "kvd never runs code that comes with a checkpoint", is_switch=True),
    "tokenizer_mode": ForeignSetting(frozenset({"auto", "hf"}), "kvd reads tokenizer.json alone"),
    "config_format": ForeignSetting(frozenset({"auto", "hf"}), "kvd reads config.json alone"),
    "load_format": ForeignSetting(
        frozenset({"auto", "safetensors", "gguf"}), "kvd reads safetensors and GGUF files alone"
    ),
    "runner": ForeignSetting(frozenset({"auto", "generate"}), "kvd generates text"),
    "task": ForeignSetting(frozenset({"auto", "generate"}), "kvd generates text"),
    "convert": ForeignSetting(frozenset({"auto", "none"}), "kvd generates text"),
    "model_impl": ForeignSetting(frozenset({"auto"}), "kvd has its own decoder"),
    "generation_config": ForeignSetting(frozenset({"auto"}), _FROM_MODEL),
    "max_logprobs": ForeignSetting(frozenset({"20"}), "kvd returns up to 20 logprobs, as OpenAI does"),
    "logprobs_mode": ForeignSetting(
        frozenset({"raw_logprobs"}), "kvd reports the model's own distribution, before temperature"
    ),
    "download_dir": ForeignSetting(frozenset(), "kvd's setting for this is home, or KVD_HOME"),
    "skip_tokenizer_init": ForeignSetting(_OFF, "kvd's clients speak text", is_switch=True),
    "enable_prompt_embeds": ForeignSetting(_OFF, "kvd takes text and token ids", is_switch=True),
    **_group(
        _FROM_MODEL,
        frozenset(),
        "tokenizer tokenizer_revision code_revision hf_config_path override_generation_config",
    ),
    **_group(_SHAPE, frozenset({"{}"}), "hf_overrides rope_scaling rope_theta"),
    **_group(_OWN_LOADER, None, "safetensors_load_strategy pt_load_map_location"),
    **_group(_OWN_LOADER, None, "use_tqdm_on_load", is_switch=True),
    **_group(_OWN_LOADER, frozenset({"{}"}), "model_loader_extra_config ignore_patterns"),
    **_group(
        _NO_PLUGINS,
        frozenset(),
        "logits_processors io_processor_plugin middleware tool_parser_plugin reasoning_parser_plugin tool_server",
    ),
    "logits_processor_pattern": ForeignSetting(None, _NO_PLUGINS),
    "additional_config": ForeignSetting(frozenset({"{}"}), _NO_PLUGINS),
    "guided_decoding_backend": ForeignSetting(None, "kvd has one grammar engine"),
    "structured_outputs_config": ForeignSetting(None, "kvd has one grammar engine"),
    **_group(
        _NO_SPECULATION,
        frozenset(),
        "speculative_config speculative_model num_speculative_tokens speculative_max_model_len",
    ),
    **_group(_NO_LORA, _OFF, "enable_lora enable_prompt_adapter", is_switch=True),
    **_group(_NO_LORA, frozenset(), "lora_modules default_mm_loras prompt_adapters"),
    **_group(_NO_LORA, None, "max_loras max_lora_rank lora_dtype max_cpu_loras lora_extra_vocab_size"),
    **_group(_NO_LORA, None, "fully_sharded_loras", is_switch=True),
    **_group(
        _TEXT_ONLY,
        None,
        "limit_mm_per_prompt media_io_kwargs mm_processor_kwargs mm_processor_cache_gb "
        "mm_processor_cache_type allowed_local_media_path allowed_media_domains mm_encoder_tp_mode "
        "mm_encoder_attn_backend video_pruning_rate",
    ),
    **_group(
        _TEXT_ONLY,
        None,
        "skip_mm_profiling interleave_mm_strings disable_mm_preprocessor_cache enable_mm_embeds",
        is_switch=True,
    ),
    # observing
    **_group(
        _OWN_LOG,
        None,
        "disable_log_requests enable_log_requests disable_log_stats disable_uvicorn_access_log "
        "aggregate_engine_logging enable_log_outputs enable_log_deltas enable_server_load_tracking "
        "log_error_stack",
        is_switch=True,
    ),
    **_group(_OWN_LOG, None, "uvicorn_log_level max_log_len log_config_file disable_access_log_for_endpoints"),
    **_group(
        _NO_TRACING,
        frozenset(),
        "otlp_traces_endpoint collect_detailed_traces show_hidden_metrics_for_version",
    ),
    **_group(_NO_TRACING, None, "kv_cache_metrics_sample profiler_config"),
    **_group(
        _NO_TRACING,
        None,
        "kv_cache_metrics cudagraph_metrics enable_mfu_metrics enable_layerwise_nvtx_tracing "
        "enable_logging_iteration_details",
        is_switch=True,
    ),
    **_group(
        _NO_TRANSFER,
        frozenset(),
        "kv_transfer_config kv_events_config ec_transfer_config weight_transfer_config",
    ),
    # HTTP
    **_group(_NO_TLS, frozenset(), "ssl_keyfile ssl_certfile ssl_ca_certs ssl_ciphers uds"),
    **_group(_NO_TLS, frozenset({"0"}), "ssl_cert_reqs"),
    **_group(_NO_TLS, _OFF, "enable_ssl_refresh", is_switch=True),
    "root_path": ForeignSetting(frozenset({"", "/"}), "kvd serves from the root of its address"),
    **_group(
        _OWN_HTTP,
        None,
        "allowed_methods allowed_headers h11_max_incomplete_event_size h11_max_header_count "
        "fingerprint_mode fingerprint_value",
    ),
    **_group(
        _OWN_HTTP,
        None,
        "allow_credentials disable_fastapi_docs enable_request_id_headers enable_prompt_tokens_details "
        "enable_force_include_usage enable_tokenizer_info_endpoint enable_per_request_metrics "
        "enable_offline_docs",
        is_switch=True,
    ),
    "return_tokens_as_token_ids": ForeignSetting(_OFF, _OWN_HTTP, is_switch=True),
    "response_role": ForeignSetting(frozenset({"assistant"}), "kvd answers as the assistant"),
    "chat_template_content_format": ForeignSetting(None, _OWN_TEMPLATE),
    "trust_request_chat_template": ForeignSetting(_OFF, "kvd renders no template that a client sends", is_switch=True),
    "default_chat_template_kwargs": ForeignSetting(frozenset({"{}"}), "a request sets chat_template_kwargs by itself"),
    **_group(
        _PARSERS,
        None,
        "enable_auto_tool_choice enable_reasoning exclude_tools_when_tool_choice_none",
        is_switch=True,
    ),
}

SHORT_FLAGS: Mapping[str, str] = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-q": "quantization",
}
"""vLLM's one-dash flags."""

NAMES_ELSEWHERE: Mapping[str, str] = {
    "ctx_size": "max_model_len",
    "context_length": "max_model_len",
    "max_seq_len": "max_model_len",
    "num_ctx": "max_model_len",
    "model_path": "model",
    "alias": "served_model_name",
    "cache_type_k": "kv_cache_dtype",
    "cache_type_v": "kv_cache_dtype",
    "cache_mode": "kv_cache_dtype",
    "cache_size": "kv_cache_memory_bytes",
    "mem_fraction_static": "gpu_memory_utilization",
    "enable_radix_cache": "enable_prefix_caching",
    "disable_radix_cache": "enable_prefix_caching",
    "max_running_requests": "max_num_seqs",
    "parallel": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "threads": "cpu_threads",
    "max_queue_size": "max_waiting",
    "disable_auth": "insecure",
}
"""What other servers call one of our settings: for the hint beside an unknown name."""
