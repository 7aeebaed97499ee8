"""Request fields that chat and completions share, and their limits. Event loop or worker thread; no I/O.

Optional fields are None when absent or `null`. Fields that kvd does not know are skipped, as are known ones
without an effect (user, metadata, store, …).
"""

from __future__ import annotations

from typing import Any, cast, get_args

import msgspec

from kvd.core import KVEviction, SamplingParams
from kvd.server.responses import invalid, short
from kvd.server.settings import SamplingDefaults
from kvd.server.validation import check_choice, check_object, check_range, check_token_ids

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 4096
MIN_KV_BUDGET_TOKENS = 64
"""Least that a request which forgets tokens may hold, as in the setting kv_eviction_tokens."""
_INT64 = (-(2**63), 2**63 - 1)
_INT32 = (-(2**31), 2**31 - 1)

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "n": (1, 128),
    "seed": _INT64,
    "priority": _INT32,
    "min_tokens": (0, 2**31),
    "kv_budget_tokens": (MIN_KV_BUDGET_TOKENS, 2**31),
}


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """How to choose tokens and when to run, by the same names in every protocol of OpenAI's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    kv_eviction: str | None = None
    kv_budget_tokens: int | None = None


class GenerationFields(SamplingFields, kw_only=True):
    """What chat and text completions understand."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self, vocab_size: int) -> None:
        """Raise a 400 that names the first field that is out of range."""
        for name, (low, high) in RANGES.items():
            check_range(name, getattr(self, name), low, high)
        check_range("top_p", self.top_p, 0, 1, is_low_excluded=True)
        check_range("top_k", self.top_k, -1, vocab_size)
        check_choice("kv_eviction", self.kv_eviction, get_args(KVEviction))
        self._check_stops(vocab_size)
        _parse_logit_bias(self.logit_bias, vocab_size)
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "'stream_options' needs 'stream': true")
        _check_response_format(self.response_format)

    def resolve_eviction(self, default: KVEviction) -> KVEviction:
        """How this request forgets tokens. Raises a 400 for a budget without anything that would keep it."""
        chosen = default if self.kv_eviction is None else cast(KVEviction, self.kv_eviction)
        if chosen == "none" and self.kv_budget_tokens is not None:
            raise invalid("kv_budget_tokens", "'kv_budget_tokens' needs a 'kv_eviction' other than 'none'")
        return chosen

    def _check_stops(self, vocab_size: int) -> None:
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise invalid("stop", f"'stop' has {len(self.stop_strings)} strings; at most {MAX_STOP_STRINGS}")
        for text in self.stop_strings:
            if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise invalid(
                    "stop", f"a stop string has {len(text)} characters; 1 to {MAX_STOP_CHARACTERS} are allowed"
                )
        check_token_ids("stop_token_ids", self.stop_token_ids or (), vocab_size)

    def resolve_sampling(
        self,
        *,
        vocab_size: int,
        defaults: SamplingDefaults,
        end_token_ids: frozenset[int],
        max_tokens: int,
        num_logprobs: int | None,
    ) -> SamplingParams:
        """Sampling with every default filled in. `max_tokens` is already clamped to what the context
        leaves.
        """
        top_k = _or(self.top_k, defaults.top_k)
        stop_ids = frozenset(self.stop_token_ids or ())
        if not self.ignore_eos:
            stop_ids |= end_token_ids
        if self.min_tokens and len(stop_ids) >= vocab_size:
            raise invalid("stop_token_ids", "'min_tokens' and 'stop_token_ids' leave no token to begin with")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_or(self.temperature, defaults.temperature),
            top_k=max(0, top_k),  # -1 is vLLM's word for "all"
            top_p=_or(self.top_p, defaults.top_p),
            min_p=_or(self.min_p, defaults.min_p),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, defaults.repetition_penalty),
            logit_bias=_parse_logit_bias(self.logit_bias, vocab_size),
            seed=self.seed,
            min_tokens=min(_or(self.min_tokens, 0), max_tokens),
            stop_token_ids=stop_ids,
            num_logprobs=num_logprobs,
        )


def check_max_tokens(name: str, value: int | None, min_tokens: int | None, *, lowest: int = 1) -> None:
    """Raise unless `value` is None or a possible length that leaves room for `min_tokens`."""
    check_range(name, value, lowest, 2**31)
    if value is not None and min_tokens is not None and min_tokens > value:
        raise invalid("min_tokens", f"'min_tokens' is {min_tokens}, but '{name}' is {value}")


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _parse_logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise invalid("logit_bias", f"'logit_bias' must map token ids to numbers, not '{short(key)}'")
        check_token_ids("logit_bias", (int(key),), vocab_size)
        check_range("logit_bias", value, -100, 100)
        pairs.append((int(key), value))
    return tuple(pairs)


def _check_response_format(value: Any) -> None:
    if value is None:
        return
    kind = check_object("response_format", value).get("type")
    if not isinstance(kind, str):
        raise invalid("response_format", "'response_format' needs a 'type'")
    check_choice("response_format.type", kind, ("text", "json_object", "json_schema"))
    if kind == "json_schema":
        schema = value.get("json_schema")
        if not isinstance(schema, dict) or not isinstance(schema.get("schema", {}), dict):
            raise invalid("response_format.json_schema", "'response_format.json_schema' must be an object")
