"""Cumulative counters of the scheduler; `Counters` in `core` is their frozen form.

Owner: the engine thread, through `Scheduler`. Work is counted when its step is committed, whether or not
its request has ended meanwhile: it was done. A hit is counted once per request, at its first admission; what a
preempted request finds again in the cache is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.cache.manager import CacheManager
from kvd.core import FinishReason, StepResult
from kvd.views import Counters, StepMix


@dataclass(slots=True)
class Tally:
    """The growing side of `views.Counters`, with the same names."""

    num_steps: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    prefill_tokens_computed: int = 0
    recomputed_tokens: int = 0
    prefix_query_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_dropped_tokens: int = 0
    num_saved_bytes: int = 0
    num_restored_bytes: int = 0
    save_seconds: float = 0.0
    restore_seconds: float = 0.0
    step_seconds: float = 0.0
    finished: dict[FinishReason, int] = field(default_factory=dict)
    last_step: StepMix = field(default_factory=StepMix)

    def count_admission(self, num_prompt: int, num_cached: int, *, was_looked_up: bool) -> None:
        self.prompt_tokens += num_prompt
        self.prompt_tokens_cached += num_cached
        if was_looked_up:
            self.prefix_query_tokens += num_prompt

    def count_restored(self, num_tokens: int) -> None:
        """Prompt tokens that came from below after the admission."""
        self.prompt_tokens_cached += num_tokens

    def count_step(self, num_prefill: int, num_decode: int, num_requests: int, seconds: float) -> None:
        self.num_steps += 1
        self.step_seconds += seconds
        self.prefill_tokens_computed += num_prefill
        if num_requests:  # a step that only moved blocks is none that an observer would look for
            self.last_step = StepMix(num_decode, num_prefill, num_requests, seconds)

    def count_moves(self, num_saved_bytes: int, num_restored_bytes: int, result: StepResult) -> None:
        self.num_saved_bytes += num_saved_bytes
        self.num_restored_bytes += num_restored_bytes
        self.save_seconds += result.save_seconds
        self.restore_seconds += result.restore_seconds

    def count_finish(self, reason: FinishReason) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def freeze(self, cache: CacheManager) -> Counters:
        tiers = cache.tiers
        return Counters(
            num_steps=self.num_steps,
            prompt_tokens=self.prompt_tokens,
            prompt_tokens_cached=self.prompt_tokens_cached,
            generation_tokens=self.generation_tokens,
            prefill_tokens_computed=self.prefill_tokens_computed,
            recomputed_tokens=self.recomputed_tokens,
            prefix_query_tokens=self.prefix_query_tokens,
            prefix_hit_tokens=self.prompt_tokens_cached,
            partial_hit_tokens=tiers.hit_tokens["partial"],
            ram_hit_tokens=tiers.hit_tokens["ram"],
            disk_hit_tokens=tiers.hit_tokens["disk"],
            num_preemptions=self.num_preemptions,
            num_swaps=self.num_swaps,
            num_evicted_blocks=cache.num_evicted_blocks,
            evicted_blocks=tuple(cache.ledger.num_evicted.items()),
            num_saved_blocks=tiers.num_saved,
            num_unsaved_blocks=tiers.num_unsaved,
            num_restored_blocks=tiers.num_restored,
            num_saved_bytes=self.num_saved_bytes,
            num_restored_bytes=self.num_restored_bytes,
            save_seconds=self.save_seconds,
            restore_seconds=self.restore_seconds,
            num_dropped_tokens=self.num_dropped_tokens,
            step_seconds=self.step_seconds,
            finished=tuple(sorted(self.finished.items())),
        )
