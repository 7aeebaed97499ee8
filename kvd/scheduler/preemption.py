"""Who gives way when a running request needs a block and none is left, and what becomes of its blocks.

The rule, in order:
  1. Never the oldest running request (by arrival). It can take blocks from everybody, so it always finishes, and
     then somebody else is the oldest: the whole makes progress.
  2. Nobody before it has sampled `quantum(k)` tokens since its k-th preemption. That doubles each time, so a request
     with n output tokens has been preempted at most `max_preemptions(n)` = 1 + ⌊log2(1 + n / 16)⌋ times. Admission must
     give such a request the blocks of its whole quantum: otherwise it could wait for a block of the oldest while the
     oldest waits for it. As it is, waiting for it is bounded by the quantum.
  3. Nobody of a better priority than the one who asks, unless that is the oldest. Who asks is a candidate too.
  4. Of the rest the lowest priority; in it the one whose return costs least time; of equals the latest arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvd.core import BLOCK_SIZE
from kvd.scheduler.rates import Rates

if TYPE_CHECKING:  # it needs `quantum` itself
    from kvd.scheduler.request_state import RequestState

FIRST_QUANTUM = 16
"""Tokens a request samples in peace after its first preemption."""

ASSUMED_PREFILL_TOKENS_PER_SECOND = 1000.0
"""Until prefill has been measured. It only ranks requests by length then, which any number does."""


def oldest_of(running: Iterable[RequestState]) -> RequestState:
    return min(running, key=lambda state: state.arrival_number)


def quantum(num_preemptions: int) -> int:
    """Tokens that a request samples after so many preemptions before it may be preempted again."""
    return FIRST_QUANTUM << (num_preemptions - 1) if num_preemptions else 0


def max_preemptions(num_output: int) -> int:
    """How often a request with so many output tokens can have been preempted, 1 + ⌊log2(1 + num_output / 16)⌋.

    The k-th preemption finds at least 16 · (1 + 2 + … + 2^(k-2)) = 16 · (2^(k-1) - 1) output tokens.
    """
    return (num_output // FIRST_QUANTUM + 1).bit_length()


class PreemptionCost(NamedTuple):
    """Seconds that preempting a request costs, from now until it has caught up again; swap: None where it cannot be."""

    recompute: float
    swap: float | None

    @property
    def way(self) -> Literal["swap", "recompute"]:
        """The cheaper one."""
        return "swap" if self.swap is not None and self.swap <= self.recompute else "recompute"

    @property
    def seconds(self) -> float:
        """What the cheaper way costs."""
        return self.recompute if self.swap is None else min(self.swap, self.recompute)


def preemption_cost(
    state: RequestState,
    rates: Rates,
    *,
    block_bytes: int,
    can_swap: bool,
    num_kept_tokens: int = 0,
    num_saved_blocks: int = 0,
) -> PreemptionCost:
    """What preempting a request costs.

    block_bytes       of one block over all layer groups
    can_swap          there is a RAM tier that has room for the request's blocks
    num_kept_tokens   leading tokens that will still be in the KV pool: others hold them as well
    num_saved_blocks  blocks beyond those that the RAM tier has already

    Recomputing costs the tokens beyond those kept, at the measured rate of prefill. Swapping costs the bytes that must
    be saved now and those that come back, each at its rate; a rate that is not known yet costs nothing, so that it
    gets measured. A request that dropped tokens holds few blocks for its tokens: all are recomputed, few are swapped.
    """
    num_tokens = max(0, state.num_computed - num_kept_tokens)
    recompute = num_tokens / (rates.prefill_tokens_per_second or ASSUMED_PREFILL_TOKENS_PER_SECOND)
    if not can_swap:
        return PreemptionCost(recompute, None)
    num_held = min(-(-state.num_computed // BLOCK_SIZE), state.blocks.num_blocks)
    num_restored = max(0, num_held - num_kept_tokens // BLOCK_SIZE)
    num_saved_now = max(0, num_restored - num_saved_blocks)
    save, restore = rates.save_bytes_per_second, rates.restore_bytes_per_second
    swap = num_saved_now * block_bytes / save if save else 0.0
    swap += num_restored * block_bytes / restore if restore else 0.0
    return PreemptionCost(recompute, swap)


def choose_victim_by_cost(
    running: Iterable[RequestState],
    asking: RequestState,
    oldest: RequestState,
    cost: Callable[[RequestState], float],
) -> RequestState | None:
    """The request to preempt so that `asking` gets a block (possibly itself); None: it has to wait.

    `cost` gives seconds; only the candidates of the lowest priority are asked about.
    """
    candidates: list[RequestState] = []
    for state in running:
        priority = state.request.priority
        if state is oldest or not state.may_be_preempted:
            continue
        if asking is not oldest and priority < asking.request.priority:
            continue
        if candidates and priority != candidates[0].request.priority:
            if priority < candidates[0].request.priority:
                continue
            candidates.clear()
        candidates.append(state)
    return min(candidates, key=lambda state: (cost(state), -state.arrival_number), default=None)
