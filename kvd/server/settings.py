"""What the HTTP server is told at start. Immutable; the command line builds it from the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvd.config_keys import ApiKey
from kvd.core import KVEviction


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Sampling where a request says nothing: the checkpoint's generation config, else plain sampling."""

    temperature: float = 1.0
    top_k: int = 0  # 0 keeps the whole vocabulary
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one server.

    served_names         model names that requests may use; `*` accepts every name. Empty: the engine's own
    end_token_ids        the model's end tokens; generation stops at them unless a request ignores them
    kv_eviction          which tokens a request forgets that does not choose for itself
    host                 the address that is listened on; a Host header that names it is accepted
    api_keys             keys with their names and limits; without any, here or in the file, no key is needed
    api_key_file         a file with further keys, which is read again when it changes
    allowed_hosts        Host names beyond loopback names and `host`; `*` accepts all
    allowed_origins      browser origins beyond localhost's, as `https://name:port`; `*` accepts all
    max_body_bytes       largest request body
    max_body_bytes_in_flight  most bytes of bodies of all requests that are being answered
    max_waiting          how many requests the engine lets wait; limits of keys are parts of it
    body_timeout_seconds how long a client may take to send a body
    keepalive_seconds    an SSE comment is sent when nothing else was for so long
    snapshot_seconds     interval of the snapshots on /kvd/events, unless a reader asks for another
    show_prompts         whether /kvd/reveal hands prompt text out
    inline_characters    longer texts are tokenized in a worker thread
    shutdown_seconds     how long open connections are waited for at the very end, after the drain
    """

    served_names: tuple[str, ...] = ()
    end_token_ids: frozenset[int] = frozenset()
    default_sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    kv_eviction: KVEviction = "none"
    host: str = "127.0.0.1"
    api_keys: tuple[ApiKey, ...] = ()
    api_key_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 64 * 2**20
    max_body_bytes_in_flight: int = 512 * 2**20
    max_waiting: int = 256
    body_timeout_seconds: float = 120.0
    keepalive_seconds: float = 15.0
    snapshot_seconds: float = 0.5
    show_prompts: bool = False
    inline_characters: int = 4000
    shutdown_seconds: float = 2.0
