"""Checks between settings, and against this version of kvd.

Purpose: refuse what cannot work before anything is loaded, with the reason and the way out, and announce what
has no effect. Called by `config_load` alone. Every function takes `where(name)`: the setting's name with the
place that set it, as an error begins.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from pathlib import Path

from kvd.config import SETTINGS, Config
from kvd.config_keys import check_keys, read_key_file
from kvd.config_kinds import short
from kvd.errors import ConfigError

Where = Callable[[str], str]

FP8_NEEDS_GPU = (
    "is refused on the CPU, which has no fp8 arithmetic; int8 takes the same memory and is closer to 16 bits"
)
_CPU_BACKENDS = ("cpu", "reference")
_NEEDS_PREFIX_CACHING = ("max_cached_tokens", "cache_eviction", "disk_cache", "keep_tool_turns")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_inline_template(chat_template: str) -> bool:
    """Whether a chat template is the template itself rather than a path, as vLLM allows."""
    return any(mark in chat_template for mark in ("{{", "{%", "\n"))


def check(config: Config, where: Where) -> list[str]:
    """Notices about `config`; raises ConfigError."""
    _check_model(config, where)
    _check_memory(config, where)
    _check_device(config, where)
    _check_access(config, where)
    notices = [
        f"{where(name)} has no effect {setting.no_effect}"
        for name, setting in SETTINGS.items()
        if setting.no_effect and getattr(config, name) != setting.default
    ]
    exact = [name for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes") if getattr(config, name)]
    weaker = [*exact[1:], "cpu_memory_utilization"] if exact else []
    notices += [
        f"{where(name)} has no effect beside {exact[0]}"
        for name in weaker
        if getattr(config, name) != SETTINGS[name].default
    ]
    if config.api_key_file is not None and os.stat(config.api_key_file).st_mode & 0o077:
        notices.append(f"{where('api_key_file')}: other users of this machine can read the file; chmod 600 mends that")
    if not config.enable_prefix_caching:
        notices += [
            f"{where(name)} has no effect without enable_prefix_caching"
            for name in _NEEDS_PREFIX_CACHING
            if getattr(config, name) != SETTINGS[name].default
        ]
    return notices


def _check_model(config: Config, where: Where) -> None:
    names = config.served_model_name
    for name in names:
        if name != name.strip():
            raise ConfigError(f"{where('served_model_name')}: {short(name)!r} begins or ends with a blank")
    if len(set(names)) != len(names):
        raise ConfigError(f"{where('served_model_name')}: the same name stands there twice")
    template = config.chat_template
    if template is not None and not is_inline_template(template) and not os.path.isfile(template):
        raise ConfigError(f"{where('chat_template')}: no such file: {short(template)}")
    if os.path.isfile(config.home_path):
        raise ConfigError(f"{where('home')}: expected a directory, {short(config.home)} is a file")


def _check_memory(config: Config, where: Where) -> None:
    if config.block_size != 16:
        raise ConfigError(
            f"{where('block_size')}: {config.block_size} is refused: kvd's kernels, cache keys and files "
            "are built on blocks of 16 tokens, and reuse below a block makes other sizes pointless"
        )
    batched, running = config.max_num_batched_tokens, config.max_num_seqs
    if batched is not None and running is not None and batched < running:
        raise ConfigError(
            f"{where('max_num_batched_tokens')}: {batched} is less than max_num_seqs "
            f"({running}): each running request needs one token per step"
        )


def _check_device(config: Config, where: Where) -> None:
    is_native = config.backend in _CPU_BACKENDS
    if config.device == "cuda" and is_native:
        raise ConfigError(
            f"{where('device')}: cuda and backend {config.backend}, which computes on the CPU, exclude each other"
        )
    if config.device == "cpu" and config.backend == "triton":
        raise ConfigError(f"{where('device')}: cpu and backend triton, which computes on the GPU, exclude each other")
    if config.dtype == "float32" and (config.device == "cuda" or config.backend == "triton"):
        raise ConfigError(
            f"{where('dtype')}: float32 is refused on the GPU, whose kernels compute with 16-bit activations"
        )
    if config.kv_cache_dtype.startswith("fp8") and (config.device == "cpu" or is_native):
        raise ConfigError(f"{where('kv_cache_dtype')}: {config.kv_cache_dtype} {FP8_NEEDS_GPU}")


def _check_access(config: Config, where: Where) -> None:
    check_keys(config.api_key, where("api_key"))
    if config.api_key_file is not None:
        keys = (*config.api_key, *read_key_file(Path(config.api_key_file)))
        check_keys(keys, f"{where('api_key_file')}, beside api_key")
    has_key = config.api_key or config.api_key_file is not None
    if not is_loopback(config.host) and not has_key and not config.insecure:
        raise ConfigError(
            f"{where('host')}: {short(config.host)} can be reached from other machines: add --api-key KEY (or api_key "
            "in the file, or KVD_API_KEY), or --insecure to serve everybody"
        )
    if config.max_body_bytes_in_flight < config.max_body_size:
        raise ConfigError(
            f"{where('max_body_bytes_in_flight')}: less than max_body_size, so the largest body could never arrive"
        )
    for origin in config.allowed_origins:
        scheme, separator, rest = origin.partition("://")
        if origin != "*" and (not separator or scheme not in ("http", "https") or not rest or "/" in rest):
            raise ConfigError(f"{where('allowed_origins')}: expected scheme://host[:port] or *, got {short(origin)!r}")
    for host in config.allowed_hosts:
        if "/" in host:
            raise ConfigError(
                f"{where('allowed_hosts')}: expected a host name without scheme or path, got {short(host)!r}"
            )
