"""The cache manager against the simplest model of it, by any sequence of calls that hypothesis can think of.

Requests are played by hand here: admitted, computed, committed, preempted, ended, in any order and number. Content is
followed token by token, as in the simulator, but what happens next is chosen by hypothesis, which also shrinks it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd.cache.manager import CacheManager, Refusal, SequenceBlocks
from kvd.core import BLOCK_SIZE, StepPlan

from .fake_tiers import FakeSlowTier
from .invariants import check_cache, check_order, check_ram
from .truth import next_value, root_value

Content = list[int | None]


@dataclass
class Player:
    """One sequence, how many of its tokens are in place, and what their values are."""

    blocks: SequenceBlocks
    token_ids: list[int]
    values: list[int]
    num_computed: int = 0
    is_running: bool = False


class Memory:
    """What `FakeSlowTier` wants of a runner."""

    def __init__(self, num_slots: int) -> None:
        self.ram: list[list[Content]] = [[[None] * BLOCK_SIZE for _ in range(num_slots)]]


class CacheMachine(RuleBasedStateMachine):
    """One layer group of a few blocks, a few RAM slots, and a slow tier. Every plan is run at once."""

    @initialize(num_blocks=st.integers(3, 9), num_slots=st.integers(0, 6), delay=st.sampled_from([0.0, 0.5]))
    def start(self, num_blocks: int, num_slots: int, delay: float) -> None:
        self.memory = Memory(num_slots)
        self.slow = FakeSlowTier(num_blocks, failure_rate=0.1 if delay else 0.0, delay=delay)
        self.slow.runner = self.memory
        self.pool: list[Content] = [[None] * BLOCK_SIZE for _ in range(num_blocks)]
        self.cache = CacheManager(
            [num_blocks],
            key_seed=b"",
            num_ram_slots=[num_slots],
            slow_tier=self.slow if num_slots else None,
            clock=lambda: 0.0,
        )
        self.players: list[Player] = []
        self.num_plans = 0

    # ------------------------------------------------------------------ plans

    def run_plan(self) -> None:
        """Make the moves that have been planned since `begin_plan`."""
        saves, copies, restores = self.cache.tiers.take_transfers()
        for save in saves:
            self.memory.ram[0][save.slot] = list(self.pool[save.block_id])
        for copy in copies:
            self.pool[copy.target] = [
                *self.pool[copy.source][: copy.num_tokens],
                *[None] * (BLOCK_SIZE - copy.num_tokens),
            ]
        for restore in restores:
            self.pool[restore.block_id] = list(self.memory.ram[0][restore.slot])
        self.num_plans += 1
        self.cache.tiers.land(StepPlan(self.num_plans, (), copies=copies, saves=saves, restores=restores))

    def commit(self, player: Player) -> None:
        self.check_content(player)
        self.cache.release(self.cache.publish(player.blocks, player.token_ids, player.num_computed))

    def check_content(self, player: Player) -> None:
        found: Content = []
        for block_id in player.blocks.tables[0]:
            found += self.pool[block_id]
        assert found[: player.num_computed] == player.values[: player.num_computed], "reads what is not its own"

    # ------------------------------------------------------------------ what may happen

    @rule(
        first=st.integers(0, 1),
        common=st.sampled_from([0, 10, 16, 20, 40]),
        own=st.sampled_from([1, 5, 16, 17, 30]),
        salt=st.sampled_from(["", "", "x"]),
    )
    def arrive(self, first: int, common: int, own: int, salt: str) -> None:
        if len(self.players) == 4:
            return
        token_ids = [7] * common + [first] * own
        values, value = [], root_value(salt)
        for token_id in token_ids:
            value = next_value(value, token_id)
            values.append(value)
        self.players.append(Player(self.cache.open(salt), token_ids, values))

    @precondition(lambda self: any(not player.is_running for player in self.players))
    @rule(data=st.data(), spare=st.integers(0, 2))
    def admit(self, data: st.DataObject, spare: int) -> None:
        player = data.draw(st.sampled_from([each for each in self.players if not each.is_running]))
        before = self.cache.gauges(), dict(self.cache._computing)
        was_swapped = player.blocks.swapped is not None
        self.cache.tiers.begin_plan()
        before = self.cache.gauges(), dict(self.cache._computing)
        outcome = self.cache.allocate(player.blocks, player.token_ids, num_spare_blocks=spare)
        if isinstance(outcome, Refusal):
            assert (self.cache.gauges(), self.cache._computing) == before, "a refusal has changed something"
            assert outcome is Refusal.NO_ROOM or not was_swapped
        else:
            assert outcome < len(player.token_ids) or was_swapped
            player.is_running, player.num_computed = True, outcome
        self.run_plan()
        if player.is_running and player.num_computed:
            self.check_content(player)

    @precondition(lambda self: any(player.blocks.restore for player in self.players))
    @rule(data=st.data(), most=st.integers(1, 5))
    def proceed(self, data: st.DataObject, most: int) -> None:
        self.advance(data.draw(st.sampled_from([each for each in self.players if each.blocks.restore])), most)

    def advance(self, player: Player, most: int) -> None:
        self.cache.tiers.begin_plan()
        reached = self.cache.tiers.proceed(player.blocks, most)
        assert reached >= player.num_computed
        self.run_plan()
        player.num_computed = reached
        if reached:
            self.commit(player)

    @precondition(lambda self: any(player.is_running and not player.blocks.restore for player in self.players))
    @rule(data=st.data(), length=st.integers(1, 40))
    def compute(self, data: st.DataObject, length: int) -> None:
        ready = [each for each in self.players if each.is_running and not each.blocks.restore]
        player = data.draw(st.sampled_from(ready))
        self.compute_until(player, min(player.num_computed + length, len(player.token_ids)))

    def compute_until(self, player: Player, end: int) -> None:
        self.cache.tiers.begin_plan()
        is_covered, retired = (
            self.cache.cover(player.blocks, player.num_computed, end) if end > player.num_computed else (True, [])
        )
        assert is_covered, "known tokens have their blocks since the admission"
        assert not retired
        self.run_plan()
        self.check_content(player)
        for position in range(player.num_computed, end):
            block_id = player.blocks.tables[0][position // BLOCK_SIZE]
            assert self.cache._groups[0].index.of_block(block_id) is None, "writes to a shareable block"
            self.pool[block_id][position % BLOCK_SIZE] = player.values[position]
            self.pool[block_id][position % BLOCK_SIZE + 1 :] = [None] * (BLOCK_SIZE - 1 - position % BLOCK_SIZE)
        player.num_computed = end
        self.commit(player)

    @precondition(lambda self: any(player.is_running for player in self.players))
    @rule()
    def finish(self) -> None:
        """The oldest that runs gets all it wants, and ends."""
        player = next(each for each in self.players if each.is_running)
        for _ in range(200):
            if player.blocks.restore is None:
                break
            self.advance(player, 2)
        assert player.blocks.restore is None, "a restore that never ends"
        self.compute_until(player, len(player.token_ids))
        self.players.remove(player)
        self.cache.free(player.blocks)

    @precondition(lambda self: any(player.is_running for player in self.players))
    @rule(data=st.data(), by_swap=st.booleans())
    def preempt(self, data: st.DataObject, by_swap: bool) -> None:
        player = data.draw(st.sampled_from([each for each in self.players if each.is_running]))
        self.cache.tiers.begin_plan()
        if by_swap and player.num_computed and not player.blocks.restore:
            is_swapped = self.cache.swapper.swap_out(player.blocks, player.num_computed)
            assert is_swapped == (player.blocks.swapped is not None)
        self.run_plan()
        self.cache.free(player.blocks)
        player.is_running, player.num_computed = False, 0

    @precondition(lambda self: self.players)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        player = data.draw(st.sampled_from(self.players))
        self.players.remove(player)
        self.cache.free(player.blocks)
        self.cache.swapper.forget(player.blocks)

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        assert self.cache.num_blocks_cached == 0

    @rule()
    def wait(self) -> None:
        self.cache.tiers.begin_plan()
        self.run_plan()

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        sequences = [player.blocks for player in self.players]
        check_cache(self.cache, sequences)
        check_order(self.cache)
        check_ram(self.cache, sequences, [], [(group_id, slot) for _, group_id, slot, *_ in self.slow.jobs])
        for sequence in self.cache._computing.values():
            assert any(player.blocks is sequence and player.is_running for player in self.players)
        for player in self.players:
            assert player.is_running or not player.blocks.num_blocks
            if player.is_running:
                self.check_content(player)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=300, stateful_step_count=50, deadline=None, derandomize=True)
