"""The metadata of a step is what its plan says, whatever the buffers held before.

Plans come from the scheduler's simulator: preemptions, shared and replaced blocks, rows that move, several groups, and
both planning depths. Each is compared with a description that is made from the plan alone, in plain Python.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from kvd.core import BLOCK_SIZE, PlanItem, StepPlan
from kvd.engine.batch_builder import BatchBuilder
from kvd_kernels.ops import Batch
from tests.scheduler.simulator import Simulation

SEEDS = range(24)
NUM_STEPS = 120


@cache
def simulated(seed: int) -> tuple[Simulation, list[StepPlan]]:
    """A simulation that has run, and its plans in the order in which they were run."""
    simulation = Simulation(seed)
    plans: list[StepPlan] = []
    run = simulation.runner.run

    def keep(plan: StepPlan):
        if plan.items:
            plans.append(plan)
        return run(plan)

    simulation.runner.run = keep  # type: ignore[method-assign]
    simulation.run(NUM_STEPS)
    return simulation, plans


def make_builder(simulation: Simulation, kind: type[BatchBuilder] = BatchBuilder) -> BatchBuilder:
    config = simulation.config
    return kind(
        simulation.cache.num_groups,
        max_tokens=config.max_num_batched_tokens,
        max_seqs=config.max_num_seqs,
        max_blocks=-(-config.max_model_len // BLOCK_SIZE),
    )


def with_holes(plans: list[StepPlan], seed: int) -> list[StepPlan]:
    """As if blocks had left a window or been dropped: requests lose entries that the step does not write to.

    What is lost lies in front, so that the rest is a range, or further back, so that a hole stays.
    """
    chance = random.Random(seed)
    gone_of: dict[tuple[str, int], tuple[int, int]] = {}

    def cut(request_id: str, group: int, table: tuple[int, ...], firsts: Sequence[int], start: int):
        first, end = gone_of.get((request_id, group), (0, 0))
        if chance.random() < 0.1:
            first = chance.randrange(3)
            end = first + chance.randrange(4)
            gone_of[request_id, group] = (first, end)
        end = min(end, bisect_right(firsts, start - BLOCK_SIZE))
        if first >= end:
            return table, firsts
        if first == 0:
            return table[end:], firsts[end:]
        return table[:first] + table[end:], (*firsts[:first], *firsts[end:])

    def cut_item(item: PlanItem) -> PlanItem:
        parts = [
            cut(item.request_id, group, table, firsts, item.start)
            for group, (table, firsts) in enumerate(zip(item.block_tables, item.first_positions, strict=True))
        ]
        tables, first_positions = zip(*parts, strict=True)
        return item._replace(block_tables=tables, first_positions=first_positions)

    return [StepPlan(plan.step_id, tuple(cut_item(item) for item in plan.items)) for plan in plans]


def expected_of(plan: StepPlan, newest: np.ndarray) -> dict[str, object]:
    """What a plan means, item by item and token by token."""
    token_ids, positions, query_starts, logit_rows = [], [], [0], []
    num_groups = len(plan.items[0].block_tables)
    groups: list[dict[str, list]] = [
        {"slots": [], "num_slots": [], "tables": [], "firsts": []} for _ in range(num_groups)
    ]
    for item in plan.items:
        known = list(item.token_ids)
        if item.last_from_slot:
            known[-1] = int(newest[item.slot])
        token_ids += known
        span = range(item.start, item.start + len(known))
        positions += span
        query_starts.append(len(token_ids))
        if item.samples:
            logit_rows.append(len(token_ids) - 1)
        for group, table, firsts in zip(groups, item.block_tables, item.first_positions, strict=True):
            place = {first + i: (entry, i) for entry, first in enumerate(firsts) for i in range(BLOCK_SIZE)}
            group["slots"] += [table[place[p][0]] * BLOCK_SIZE + place[p][1] for p in span]
            group["num_slots"].append(place[span[-1]][0] * BLOCK_SIZE + place[span[-1]][1] + 1)
            group["tables"].append(list(table))
            group["firsts"].append(list(firsts))
    return {
        "token_ids": token_ids, "positions": positions, "query_starts": query_starts, "logit_rows": logit_rows,
        "groups": groups,
    }  # fmt: skip


def found_in(batch: Batch, plan: StepPlan) -> dict[str, object]:
    num_tokens, num_seqs = batch.num_tokens, batch.num_seqs
    groups = []
    for number, group in enumerate(batch.groups):
        lengths = [len(item.block_tables[number]) for item in plan.items]
        groups.append({
            "slots": group.write_slots[:num_tokens].tolist(),
            "num_slots": group.num_slots[:num_seqs].tolist(),
            "tables": [group.block_tables[row, :length].tolist() for row, length in enumerate(lengths)],
            "firsts": [group.first_positions[row, :length].tolist() for row, length in enumerate(lengths)],
        })  # fmt: skip
    return {
        "token_ids": batch.token_ids[:num_tokens].tolist(),
        "positions": batch.positions[:num_tokens].tolist(),
        "query_starts": batch.query_starts[: num_seqs + 1].tolist(),
        "logit_rows": batch.logit_rows[: batch.num_logit_rows].tolist(),
        "groups": groups,
    }


def check(builder: BatchBuilder, plans: list[StepPlan], num_slots: int) -> None:
    chance = np.random.default_rng(0)
    for plan in plans:
        newest = chance.integers(100, 200, num_slots)
        batch = builder.fill(plan, newest)
        assert batch is builder.batch
        assert found_in(batch, plan) == expected_of(plan, newest), f"step {plan.step_id}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_batch_is_what_its_plan_says(seed: int) -> None:
    simulation, plans = simulated(seed)
    check(make_builder(simulation), plans, simulation.config.max_num_seqs)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_batch_is_what_its_plan_says_where_tables_have_holes(seed: int) -> None:
    simulation, plans = simulated(seed)
    check(make_builder(simulation), with_holes(plans, seed), simulation.config.max_num_seqs)


def test_the_plans_hold_what_matters() -> None:
    simulations = [simulated(seed)[0] for seed in SEEDS]
    items = [item for seed in SEEDS for plan in simulated(seed)[1] for item in plan.items]
    assert sum(simulation.scheduler.counters().num_preemptions for simulation in simulations) > 20
    assert {simulation.depth for simulation in simulations} == {0, 1}
    assert {simulation.cache.num_groups for simulation in simulations} == {1, 2, 3}
    assert any(item.last_from_slot and item.num_tokens == 1 for item in items)
    assert any(item.num_tokens == 1 and not item.samples for item in items)
    tables = [
        (item.num_tokens, firsts)
        for seed in SEEDS
        for plan in with_holes(simulated(seed)[1], seed)
        for item in plan.items
        for firsts in item.first_positions
    ]
    for is_single in (True, False):
        some = [firsts for num_tokens, firsts in tables if (num_tokens == 1) is is_single]
        assert any(isinstance(firsts, range) and firsts.start for firsts in some)
        assert any(isinstance(firsts, tuple) and firsts[0] == 0 for firsts in some)


class TrustsTheRequest(BatchBuilder):
    """Planted fault: takes a request that stays in its row for one whose table only grows."""

    def _write_row(self, sequence: int, item: PlanItem) -> None:
        owners = self.__dict__.setdefault("owners", {})
        if owners.get(sequence) == item.request_id:
            tables, first_positions = self._held[sequence]
            believed = tuple(new[: len(old)] for old, new in zip(tables, item.block_tables, strict=True))
            self._held[sequence] = (believed, first_positions)
        owners[sequence] = item.request_id
        super()._write_row(sequence, item)


class IgnoresRepeatedLengths(BatchBuilder):
    """Planted fault: takes a table that is as long as the one before for the same."""

    def _write_row(self, sequence: int, item: PlanItem) -> None:
        if [len(table) for table in self._held[sequence][0]] != [len(table) for table in item.block_tables]:
            super()._write_row(sequence, item)


class TrustsTheFirstEntry(BatchBuilder):
    """Planted fault: takes first positions that begin as those before did for the same ones, only longer."""

    def _write_positions(self, group: int, sequence: int, old: Sequence[int], new: Sequence[int]) -> None:
        super()._write_positions(group, sequence, new if old and new and old[0] == new[0] else old, new)


class ForgetsHoles(BatchBuilder):
    """Planted fault: a row that was displaced once is taken for dense later, and the other way round."""

    def _write_positions(self, group: int, sequence: int, old: Sequence[int], new: Sequence[int]) -> None:
        was_displaced = sequence in self._displaced[group]
        super()._write_positions(group, sequence, old, new)
        if old:
            (self._displaced[group].add if was_displaced else self._displaced[group].discard)(sequence)


@pytest.mark.parametrize("faulty", [TrustsTheFirstEntry, ForgetsHoles])
def test_a_planted_fault_about_holes_is_found(faulty: type[BatchBuilder]) -> None:
    num_found = 0
    for seed in SEEDS:
        simulation, plans = simulated(seed)
        try:
            check(make_builder(simulation, faulty), with_holes(plans, seed), simulation.config.max_num_seqs)
        except (AssertionError, IndexError):
            num_found += 1
    assert num_found > 2


@pytest.mark.parametrize("faulty", [TrustsTheRequest, IgnoresRepeatedLengths])
def test_a_planted_fault_is_found(faulty: type[BatchBuilder]) -> None:
    num_found = 0
    for seed in SEEDS:
        simulation, plans = simulated(seed)
        try:
            check(make_builder(simulation, faulty), plans, simulation.config.max_num_seqs)
        except (AssertionError, IndexError):
            num_found += 1
    assert num_found > 2


def test_a_table_that_is_too_long_leaves_nothing_half_believed() -> None:
    builder = BatchBuilder(1, max_tokens=64, max_seqs=2, max_blocks=3)

    def plan(table: tuple[int, ...]) -> StepPlan:
        positions = range(0, len(table) * BLOCK_SIZE, BLOCK_SIZE)
        return StepPlan(1, (PlanItem("it", 0, len(table) * 16 - 1, (5,), (table,), (positions,), True),))

    first = plan((7, 8, 9))
    check(builder, [first], 1)
    with pytest.raises(ValueError, match="broadcast"):
        builder.fill(plan((1, 2, 3, 4)), np.zeros(1, dtype=np.int64))
    check(builder, [first], 1)


def test_a_row_whose_writing_failed_believes_nothing_of_its_positions_either() -> None:
    builder = BatchBuilder(1, max_tokens=64, max_seqs=2, max_blocks=3)

    def plan(table: tuple[int, ...], positions: Sequence[int]) -> StepPlan:
        return StepPlan(1, (PlanItem("it", 0, positions[-1] + 3, (5,), (table,), (positions,), True),))

    check(builder, [plan((7, 8), range(64, 96, BLOCK_SIZE))], 1)
    with pytest.raises(ValueError, match="broadcast"):
        builder.fill(plan((1, 2, 3, 4), range(0, 64, BLOCK_SIZE)), np.zeros(1, dtype=np.int64))
    check(builder, [plan((7, 8), range(0, 32, BLOCK_SIZE)), plan((7, 8, 9), (0, 64, 80))], 1)
