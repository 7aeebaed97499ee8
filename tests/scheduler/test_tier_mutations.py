"""The simulator can see faults of tiers, joining, forgetting and windows."""

from __future__ import annotations

import pytest

from kvd.cache.layer_group import LayerGroup
from kvd.cache.lower_tiers import LowerTiers
from kvd.cache.manager import CacheManager
from kvd.cache.ram_tier import RamBlock, RamTier
from kvd.cache.swapping import Swapper
from kvd.core import BlockCopy, BlockTransfer, StepPlan
from kvd.scheduler.budget import Budget
from kvd.scheduler.dropping import DropSchedule
from kvd.scheduler.planning import Planner
from kvd.scheduler.request_state import RequestState
from kvd.scheduler.scheduler import Scheduler

from .planting import Planted, planting

MUTATIONS: dict[str, Planted] = {}
mutation = planting(MUTATIONS)


# --------------------------------------------------------------------------- tiers


@mutation(2)
def skip_the_hold_of_a_restore(patch: pytest.MonkeyPatch) -> None:
    """A slot may be given to somebody else before the restore that is planned from it has run."""
    land = LowerTiers.land
    plan_step = LowerTiers._plan_step

    def unheld(self: LowerTiers, sequence, step) -> None:
        num_before = len(self._restores)
        plan_step(self, sequence, step)
        for transfer in self._restores[num_before:]:
            self.ram.release(self.ram.at(transfer.group_id, transfer.slot))

    def land_saves(self: LowerTiers, plan: StepPlan) -> None:
        land(self, StepPlan(plan.step_id, plan.items, saves=plan.saves))

    patch.setattr(LowerTiers, "_plan_step", unheld)
    patch.setattr(LowerTiers, "land", land_saves)


@mutation()
def skip_the_hold_of_a_store(patch: pytest.MonkeyPatch) -> None:
    """A slot may be given to somebody else while the slow tier still reads it."""
    store, begin = LowerTiers._store, LowerTiers.begin_plan

    def unheld(self: LowerTiers, block: RamBlock, key: bytes) -> None:
        holds = block.holds
        store(self, block, key)
        if block.holds > holds:
            self.ram.release(block)

    def begin_plan(self: LowerTiers) -> None:
        poll = self.slow.poll

        def only_loads():
            done = poll()
            self._num_under_way -= sum(not each.is_load for each in done)
            return [each for each in done if each.is_load]

        self.slow.poll = only_loads
        try:
            begin(self)
        finally:
            self.slow.poll = poll

    patch.setattr(LowerTiers, "_store", unheld)
    patch.setattr(LowerTiers, "begin_plan", begin_plan)


@mutation(2)
def never_release_what_a_restore_has_held(patch: pytest.MonkeyPatch) -> None:
    def leak(self: LowerTiers, sequence) -> None:
        sequence.restore = None

    patch.setattr(LowerTiers, "cancel", leak)


@mutation(7)
def save_after_others_have_computed(patch: pytest.MonkeyPatch) -> None:
    """The saves of a plan are planned when its blocks have been given away."""
    begin, take = LowerTiers.begin_plan, LowerTiers.take_transfers

    def begin_plan(self: LowerTiers) -> None:
        published, self._published = self._published, []
        begin(self)
        self._late = [*getattr(self, "_late", []), *published]

    def take_transfers(self: LowerTiers):
        transfers = take(self)
        if transfers[1] or transfers[2]:
            return transfers
        self._published, self._late = [*self._late, *self._published], []
        poll, self._num_under_way = self._num_under_way, 0
        begin(self)
        self._num_under_way = poll
        return take(self)

    patch.setattr(LowerTiers, "begin_plan", begin_plan)
    patch.setattr(LowerTiers, "take_transfers", take_transfers)


@mutation(2)
def restore_before_the_load_has_ended(patch: pytest.MonkeyPatch) -> None:
    is_possible = LowerTiers._is_possible

    def hasty(self: LowerTiers, restore) -> bool | None:
        found = is_possible(self, restore)
        step = restore.steps[restore.num_done]
        return True if found is None and len(step.slots) == len(self._groups) else found

    patch.setattr(LowerTiers, "_is_possible", hasty)


@mutation(2)
def use_what_failed_to_load(patch: pytest.MonkeyPatch) -> None:
    def ready(self: RamTier, block: RamBlock) -> None:
        block.is_ready = True

    patch.setattr(RamTier, "fail", ready)


@mutation()
def leave_out_long_copies(patch: pytest.MonkeyPatch) -> None:
    take = LowerTiers.take_transfers

    def generous(self: LowerTiers):
        saves, copies, restores = take(self)
        return saves, tuple(copy for copy in copies if copy.num_tokens < 8), restores

    patch.setattr(LowerTiers, "take_transfers", generous)


@mutation(2)
def copy_to_the_wrong_group(patch: pytest.MonkeyPatch) -> None:
    take = LowerTiers.take_transfers

    def crossed(self: LowerTiers):
        saves, copies, restores = take(self)
        last = len(self._groups) - 1
        copies = tuple(BlockCopy(last - each.group_id, each.source, each.target, each.num_tokens) for each in copies)
        return saves, copies, restores

    patch.setattr(LowerTiers, "take_transfers", crossed)


@mutation(7)
def restore_the_wrong_slot(patch: pytest.MonkeyPatch) -> None:
    take = LowerTiers.take_transfers

    def crossed(self: LowerTiers):
        saves, copies, restores = take(self)
        if len(restores) > 1 and restores[0].group_id == restores[1].group_id:
            first, second, *rest = restores
            swapped = BlockTransfer(first.group_id, first.block_id, second.slot)
            restores = (swapped, BlockTransfer(second.group_id, second.block_id, first.slot), *rest)
        return saves, copies, restores

    patch.setattr(LowerTiers, "take_transfers", crossed)


@mutation(26)
def swap_out_what_is_computed_by_the_same_plan(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Budget, "num_savable", lambda self, state: state.num_planned)


@mutation(1290)
def share_a_block_that_was_completed_after_the_swap(patch: pytest.MonkeyPatch) -> None:
    wants = Swapper.wants

    def generous(self: Swapper, sequence, num_total: int):
        num_tokens, sequence.swapped.num_tokens = sequence.swapped.num_tokens, 1 << 20
        found = wants(self, sequence, num_total)
        sequence.swapped.num_tokens = num_tokens
        return found

    patch.setattr(Swapper, "wants", generous)


@mutation(7)
def forget_what_was_swapped_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Swapper, "forget", lambda self, sequence: None)


# --------------------------------------------------------------------------- joining, forgetting, windows


@mutation()
def do_not_wait_for_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheManager, "_register", lambda self, sequence, token_ids, first, last: None)


@mutation(6)
def wait_for_a_neighbour_that_has_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheManager, "_unregister", lambda self, sequence: None)


@mutation(10)
def share_after_a_drop(patch: pytest.MonkeyPatch) -> None:
    drop = CacheManager.drop

    def careless(self: CacheManager, sequence, dropped):
        retired = drop(self, sequence, dropped)
        sequence.has_dropped = False
        return retired

    patch.setattr(CacheManager, "drop", careless)


@mutation(4)
def match_what_was_computed_before_a_drop_beyond_the_budget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DropSchedule, "max_matched_tokens", property(lambda self: 1 << 20))
    allocate = CacheManager.allocate

    def unlimited(self: CacheManager, sequence, token_ids, **options):
        return allocate(self, sequence, token_ids, **(options | {"max_blocks": None}))

    patch.setattr(CacheManager, "allocate", unlimited)


@mutation(10)
def give_attention_to_the_wrong_blocks(patch: pytest.MonkeyPatch) -> None:
    accumulate = Scheduler._accumulate
    patch.setattr(
        Scheduler, "_accumulate", lambda self, state, item, masses: accumulate(self, state, item, [*masses][::-1])
    )


@mutation(4)
def compute_across_a_drop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DropSchedule, "limit", lambda self, start: start + 1 + 16 * self.budget_blocks)


@mutation(44)
def drop_while_a_step_reads(patch: pytest.MonkeyPatch) -> None:
    retire = Planner._retire

    def at_once(self: Planner, state: RequestState, blocks, budget: Budget) -> None:
        if blocks and state.num_in_flight:
            self._cache.release(blocks)
        else:
            retire(self, state, blocks, budget)

    patch.setattr(Planner, "_retire", at_once)


@mutation(44)
def keep_what_left_the_window(patch: pytest.MonkeyPatch) -> None:
    first_seen = LayerGroup.first_seen
    patch.setattr(LayerGroup, "first_seen", lambda self, position: max(0, first_seen(self, position) - 6))


@mutation(21)
def give_up_a_block_too_early(patch: pytest.MonkeyPatch) -> None:
    first_seen = LayerGroup.first_seen

    def early(self: LayerGroup, position: int) -> int:
        return min(first_seen(self, position) + 1, position // 16) if self.window else 0

    patch.setattr(LayerGroup, "first_seen", early)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name].must_be_found(monkeypatch)
