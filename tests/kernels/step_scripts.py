"""Random sequences of steps, block copies and transfers, and two ways to run them.

One plays them one after the other on a backend that finishes each call, the other as the GPU's program launches them.
Both must leave the same tokens, logits and bytes.

A script is made before it is run and depends on no token: what a step computes after its last known token, it takes
from the slot. Blocks change hands at once: one that was saved, copied or given up may be written to by the next step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from kvd.core import BLOCK_SIZE, PlanItem, StepPlan
from kvd.engine.batch_builder import BatchBuilder
from kvd.model.decoder import Decoder
from kvd.model.progress import QuietProgress
from kvd.model.weights import ModelWeights
from kvd_kernels.ops import Batch, KVCache, Ops, PendingStep, SamplingBatch, SamplingResult, Transfer

MAX_TOKENS, MAX_SEQS, MAX_BLOCKS = 24, 5, 4
NUM_BLOCKS, NUM_HOST_ROWS = 32, 6
MAX_LENGTH = MAX_BLOCKS * BLOCK_SIZE
VOCABULARY = 300


@dataclass(frozen=True)
class Step:
    """wants_tokens: they are sampled; else the logits are looked at. lands: waits for it before anything else."""

    plan: StepPlan
    wants_tokens: bool
    lands: bool


@dataclass(frozen=True)
class Save:
    """waits: at once; else before its rows are used again, or at the end."""

    group_id: int
    blocks: tuple[int, ...]
    rows: tuple[int, ...]
    waits: bool


@dataclass(frozen=True)
class Restore:
    group_id: int
    rows: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    group_id: int
    source: int
    target: int
    num_tokens: int


Action = Step | Save | Restore | Copy


@dataclass
class _Sequence:
    """tables: of each group, its blocks. knows_last: the newest token was not left to the slot."""

    length: int = 0
    tables: list[list[int]] = field(default_factory=list)
    knows_last: bool = True


class _Writer:
    """Makes a script; `free` are the blocks of each group that no sequence has, the next to be given out first."""

    def __init__(self, seed: int, num_groups: int) -> None:
        self._chance = random.Random(seed)
        self._num_groups = num_groups
        self._free = [self._chance.sample(range(NUM_BLOCKS), NUM_BLOCKS) for _ in range(num_groups)]
        self._sequences = [_Sequence(tables=[[] for _ in range(num_groups)]) for _ in range(MAX_SEQS)]
        self._next_row = 0
        self.actions: list[Action] = []

    def _release(self, group: int, block: int) -> None:
        # Most likely the next block to be written to: hazards should be met.
        self._free[group].insert(0, block)

    def _drop(self, sequence: _Sequence) -> None:
        """It begins anew; its blocks are free."""
        for group, table in enumerate(sequence.tables):
            for block in table:
                self._release(group, block)
            table.clear()
        sequence.length, sequence.knows_last = 0, True

    def write(self, num_steps: int) -> list[Action]:
        for number in range(num_steps):
            for _ in range(self._chance.randrange(3)):
                self._move()
            self._step(number)
        return self.actions

    def _move(self) -> None:
        """Another block in the place of one, by a copy or by way of the host; or a sequence is saved and given up."""
        chance = self._chance
        group = chance.randrange(self._num_groups)
        found = self._any_block(group)
        if found is None:
            return
        owner, place = found
        old = owner.tables[group][place]
        kind = chance.random()
        if kind < 0.35:
            self._copy_away(group, owner, place)
            return
        row = self._next_row
        self._next_row = (row + 1) % NUM_HOST_ROWS
        # One more where there is room: the block behind it, so that both are one copy, or another.
        other = (old + (1 if chance.random() < 0.5 else 5)) % NUM_BLOCKS
        blocks = (old, other)[: NUM_HOST_ROWS - row]
        self.actions.append(Save(group, blocks, tuple(range(row, row + len(blocks))), chance.random() < 0.3))
        if kind < 0.6:
            new = owner.tables[group][place] = self._free[group].pop(0)
            self.actions.append(Restore(group, (row,), (new,)))
            self._release(group, old)
        elif kind < 0.9:
            self._drop(owner)
            self._free[group].remove(old)
            self._release(group, old)
            found = self._any_block(group)
            if found is not None and kind < 0.75:
                self._copy_away(group, *found)

    def _any_block(self, group: int) -> tuple[_Sequence, int] | None:
        """Sequence and place of a block in use, where another is free."""
        places = [(sequence, place) for sequence in self._sequences for place in range(len(sequence.tables[group]))]
        return self._chance.choice(places) if places and self._free[group] else None

    def _copy_away(self, group: int, owner: _Sequence, place: int) -> None:
        old, new = owner.tables[group][place], self._free[group].pop(0)
        self.actions.append(Copy(group, old, new, BLOCK_SIZE))
        owner.tables[group][place] = new
        self._release(group, old)

    def _step(self, number: int) -> None:
        chance = self._chance
        is_decode = chance.random() < 0.7
        wants_tokens = chance.random() < 0.85
        slots = sorted(chance.sample(range(MAX_SEQS), chance.randrange(1, MAX_SEQS + 1)), key=lambda _: chance.random())
        items, left = [], MAX_TOKENS
        for slot in slots:
            sequence = self._sequences[slot]
            longest = min(left, 9)
            count = 1 if is_decode else chance.randrange(1, longest + 1)
            if sequence.length + count > MAX_LENGTH:
                self._drop(sequence)
            left -= count
            items.append(self._item(slot, sequence, count, samples=is_decode or chance.random() < 0.8))
            sequence.knows_last = not (wants_tokens and items[-1].samples)
            if left < 1:
                break
        self.actions.append(Step(StepPlan(number, tuple(items)), wants_tokens, chance.random() < 0.3))

    def _item(self, slot: int, sequence: _Sequence, count: int, *, samples: bool) -> PlanItem:
        start = sequence.length
        sequence.length += count
        num_blocks = -(-sequence.length // BLOCK_SIZE)
        for group, table in enumerate(sequence.tables):
            while len(table) < num_blocks:
                table.append(self._free[group].pop(0))
        tokens = tuple(self._chance.randrange(VOCABULARY) for _ in range(count))
        # What came of the slot's last sample stands in front of new tokens; a plan knows one such token, the last.
        from_slot = not sequence.knows_last and count == 1
        positions = range(0, num_blocks * BLOCK_SIZE, BLOCK_SIZE)
        return PlanItem(
            f"r{slot}", slot, start, tokens, tuple(tuple(table) for table in sequence.tables),
            (positions,) * self._num_groups, samples, last_from_slot=from_slot,
        )  # fmt: skip


def write_script(seed: int, num_groups: int, num_steps: int) -> list[Action]:
    return _Writer(seed, num_groups).write(num_steps)


@dataclass
class Outcome:
    """tokens and logits by step; saved: what the rows of a save held when it was over, by action."""

    tokens: dict[int, list[int | None]] = field(default_factory=dict)
    logits: dict[int, bytes] = field(default_factory=dict)
    saved: dict[int, bytes] = field(default_factory=dict)
    pools: list[bytes] = field(default_factory=list)


class Stage:
    """A decoder on a backend, a cache, host rows, and the program that runs on them.

    settle: everything that was launched has to be over behind it.
    """

    def __init__(self, weights: ModelWeights, ops: Ops, *, settle: Callable[[], None] = lambda: None) -> None:
        kv_format = weights.spec.kv_format("int8")
        self.ops = ops
        self.decoder = Decoder(
            weights, ops, kv_format,
            max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS, max_positions=MAX_LENGTH, progress=QuietProgress(),
        )  # fmt: skip
        random_bytes = torch.Generator().manual_seed(1)
        self.cache = KVCache(
            kv_format,
            tuple(
                torch.randint(0, 120, (NUM_BLOCKS, group.block_bytes), generator=random_bytes, dtype=torch.uint8)
                for group in kv_format.groups
            ),
        )
        self.host = [ops.allocate_host(NUM_HOST_ROWS, group.block_bytes) for group in kv_format.groups]
        for rows in self.host:
            rows.zero_()
        self.builder = BatchBuilder(
            len(kv_format.groups), max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS, max_blocks=MAX_BLOCKS
        )
        self.program = ops.record(self.builder.batch, self.cache, partial(self.decoder.forward, cache=self.cache))
        self.params = SamplingBatch.allocate(MAX_SEQS)
        self._settle = settle

    def fill(self, plan: StepPlan, newest_tokens: np.ndarray) -> Batch:
        batch = self.builder.fill(plan, newest_tokens)
        rows = batch.num_logit_rows
        self.params.num_rows = rows
        self.params.temperature[:rows] = torch.arange(rows) % 2  # greedy and not
        self.params.top_p.fill_(1.0)
        self.params.seeds[:rows] = torch.arange(rows) + 10 * plan.step_id
        self.params.positions[:rows] = plan.step_id
        return batch

    def outcome_of(self, outcome: Outcome) -> Outcome:
        self._settle()
        outcome.pools = [pool.numpy().tobytes() for pool in self.cache.pools]
        return outcome


def play_in_order(stage: Stage, actions: list[Action]) -> Outcome:
    """One after the other; every token is known when the next step begins."""
    outcome, newest = Outcome(), np.zeros(MAX_SEQS, dtype=np.int64)
    for number, action in enumerate(actions):
        if isinstance(action, Step):
            batch = stage.fill(action.plan, newest)
            result = stage.program.run(batch, stage.params if action.wants_tokens else None)
            note(stage, action, result, outcome, batch.num_logit_rows)
            if result is not None:
                samples = [item for item in action.plan.items if item.samples]
                for item, token in zip(samples, result.token_ids, strict=True):
                    newest[item.slot] = token
        else:
            move(stage, action)
            if isinstance(action, Save):
                outcome.saved[number] = rows_of(stage, action)
    return stage.outcome_of(outcome)


def play_ahead(stage: Stage, actions: list[Action]) -> Outcome:
    """A step is launched before the one before it has landed; tokens that nobody knows go by their slots."""
    outcome, by_slot = Outcome(), -1 - np.arange(MAX_SEQS)
    flying: list[tuple[Step, PendingStep, int]] = []
    saves: dict[int, tuple[Save, Transfer]] = {}  # that nobody has waited for, by action

    def land() -> None:
        step, pending, num_rows = flying.pop(0)
        note(stage, step, pending.result(), outcome, num_rows)

    def wait_for(number: int) -> None:
        save, transfer = saves.pop(number)
        assert transfer.seconds() >= 0
        outcome.saved[number] = rows_of(stage, save)

    for number, action in enumerate(actions):
        if isinstance(action, Step):
            batch = stage.fill(action.plan, by_slot)
            pending = stage.program.launch(batch, stage.params if action.wants_tokens else None)
            flying.append((action, pending, batch.num_logit_rows))
            spoil(batch, stage.params)
            while len(flying) > (0 if action.lands or not action.wants_tokens else 1):
                land()
            continue
        if isinstance(action, Save):  # the rows are its own from now on
            for earlier, (save, _) in list(saves.items()):
                if save.group_id == action.group_id and set(save.rows) & set(action.rows):
                    wait_for(earlier)
        transfer = move(stage, action)
        if isinstance(action, Save) and transfer is not None:
            saves[number] = (action, transfer)
            if action.waits:
                wait_for(number)
    while flying:
        land()
    for number in list(saves):
        wait_for(number)
    return stage.outcome_of(outcome)


def spoil(batch: Batch, params: SamplingBatch) -> None:
    """What a launch has handed back, somebody fills anew: with other numbers here, all of them possible."""
    batch.num_tokens = batch.num_seqs = batch.num_logit_rows = 1
    batch.max_slots = batch.max_query_tokens = 1
    params.temperature += 1
    params.seeds.fill_(5)


def rows_of(stage: Stage, save: Save) -> bytes:
    return bytes(stage.host[save.group_id][list(save.rows)].numpy().tobytes())


def move(stage: Stage, action: Save | Restore | Copy) -> Transfer | None:
    pool, host = stage.cache.pools[action.group_id], stage.host[action.group_id]
    if isinstance(action, Copy):
        stage.ops.copy_block(stage.cache, action.group_id, action.source, action.target, action.num_tokens)
        return None
    if isinstance(action, Restore):
        return stage.ops.copy_rows(host, action.rows, pool, action.blocks)
    return stage.ops.copy_rows(pool, action.blocks, host, action.rows)


def note(stage: Stage, step: Step, result: SamplingResult | None, outcome: Outcome, num_rows: int) -> None:
    if result is None:
        outcome.logits[step.plan.step_id] = stage.program.logits[:num_rows].numpy().tobytes()
    else:
        outcome.tokens[step.plan.step_id] = result.token_ids
