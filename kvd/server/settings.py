"""What the HTTP server is told at start. Immutable; the command line builds it from the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    api_keys             pairs (name, key); empty: no key is needed
    allowed_hosts        Host names beyond loopback names and `host`; `*` accepts all
    allowed_origins      browser origins beyond localhost's, as `https://name:port`; `*` accepts all
    max_body_bytes       largest request body
    body_timeout_seconds how long a client may take to send a body
    keepalive_seconds    an SSE comment is sent when nothing else was for so long
    snapshot_seconds     interval of the snapshots on /kvd/events
    inline_characters    longer texts are tokenized in a worker thread
    shutdown_seconds     how long open connections are waited for at the very end, after the drain
    """

    served_names: tuple[str, ...] = ()
    end_token_ids: frozenset[int] = frozenset()
    default_sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    kv_eviction: KVEviction = "none"
    host: str = "127.0.0.1"
    api_keys: tuple[tuple[str, str], ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 64 * 2**20
    body_timeout_seconds: float = 120.0
    keepalive_seconds: float = 15.0
    snapshot_seconds: float = 0.5
    inline_characters: int = 4000
    shutdown_seconds: float = 2.0
