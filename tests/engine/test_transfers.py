"""Blocks between the KV pool and the RAM tier: whole, in the order of the plan, and to the right place."""

from __future__ import annotations

import pytest
import torch

from kvd.cache.store import (
    Arena,
    allocate_arena,
    allocate_cache,
    read_block,
    restore_blocks,
    save_blocks,
    write_block,
)
from kvd.core import BLOCK_SIZE, BlockCopy, BlockTransfer, StepPlan
from kvd.engine.runner import Runner
from kvd_kernels.kv_format import KVFormat, LayerFormat, build_kv_format
from kvd_kernels.ops import KVCache, Ops
from kvd_kernels.registry import create_ops
from tests.engine.test_runner import ToyDecoder

CPU = torch.device("cpu")
NUM_BLOCKS, NUM_SLOTS = 12, 7


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return create_ops(request.param)


def two_groups() -> KVFormat:
    """Groups of different block sizes."""
    plain, wide = LayerFormat(1, 4, "int8", "int8"), LayerFormat(2, 20, "fp16", "int8")
    return build_kv_format([(0, plain), (64, wide), (64, plain)])


def filled(kv_format: KVFormat) -> tuple[KVCache, Arena]:
    """A cache and an arena in which every byte is random."""
    random = torch.Generator().manual_seed(3)
    cache, arena = (
        allocate_cache(kv_format, NUM_BLOCKS, CPU),
        allocate_arena(kv_format, NUM_SLOTS, create_ops("reference")),
    )
    for tensor in (*cache.pools, *arena.slots):
        tensor.random_(0, 256, generator=random)
    return cache, arena


TRANSFERS = (
    BlockTransfer(1, 3, 0),
    BlockTransfer(0, 11, 6),
    BlockTransfer(1, 0, 5),
    BlockTransfer(1, 11, 2),
    BlockTransfer(0, 0, 0),
)


def test_saves_and_restores_move_whole_blocks_and_nothing_else(ops: Ops) -> None:
    kv_format = two_groups()
    cache, arena = filled(kv_format)
    pools, slots = [pool.clone() for pool in cache.pools], [group.clone() for group in arena.slots]
    save_blocks(ops, cache, arena, TRANSFERS)
    for transfer in TRANSFERS:
        slots[transfer.group_id][transfer.slot] = pools[transfer.group_id][transfer.block_id]
    assert all(torch.equal(got, expected) for got, expected in zip(cache.pools, pools, strict=True))
    assert all(torch.equal(got, expected) for got, expected in zip(arena.slots, slots, strict=True))
    moved = [BlockTransfer(group_id, (block_id + 1) % NUM_BLOCKS, slot) for group_id, block_id, slot in TRANSFERS]
    restore_blocks(ops, cache, arena, moved)
    for group_id, block_id, slot in moved:
        pools[group_id][block_id] = slots[group_id][slot]
    assert all(torch.equal(got, expected) for got, expected in zip(cache.pools, pools, strict=True))
    assert all(torch.equal(got, expected) for got, expected in zip(arena.slots, slots, strict=True))


def test_rows_outside_are_refused(ops: Ops) -> None:
    cache, arena = filled(two_groups())
    for block_id, slot in ((-1, 0), (0, -1), (NUM_BLOCKS, 0), (0, NUM_SLOTS)):
        with pytest.raises((AssertionError, IndexError)):
            save_blocks(ops, cache, arena, [BlockTransfer(0, block_id, slot)])


def test_a_slot_is_memory_that_others_read_and_write() -> None:
    kv_format = two_groups()
    _, arena = filled(kv_format)
    for group_id, group in enumerate(kv_format.groups):
        for slot in (0, NUM_SLOTS - 1):
            memory = arena.memory(group_id, slot)
            assert len(memory) == memory.nbytes == group.block_bytes
            assert bytes(memory) == arena.slots[group_id][slot].numpy().tobytes()
            before = arena.slots[group_id].clone()
            memory[:] = bytes(range(256)) * (group.block_bytes // 256) + bytes(group.block_bytes % 256)
            before[slot] = torch.frombuffer(bytearray(memory), dtype=torch.uint8)
            assert torch.equal(arena.slots[group_id], before)
        with pytest.raises(AssertionError):
            arena.memory(group_id, NUM_SLOTS)


def test_groups_may_have_different_numbers_of_slots_or_none() -> None:
    kv_format = two_groups()
    arena = allocate_arena(kv_format, (0, 3), create_ops("reference"))
    assert [len(group) for group in arena.slots] == [0, 3]
    assert len(arena.memory(1, 2)) == kv_format.groups[1].block_bytes


def test_the_bytes_of_a_block_go_to_a_file_and_back() -> None:
    kv_format = two_groups()
    cache, _ = filled(kv_format)
    for group_id, pool in enumerate(cache.pools):
        expected = pool.clone()
        data = read_block(cache, group_id, 4)
        assert data == pool[4].numpy().tobytes()
        write_block(cache, group_id, 9, memoryview(data))
        expected[9] = expected[4]
        assert torch.equal(pool, expected)
        with pytest.raises(AssertionError, match="bytes for a block"):
            write_block(cache, group_id, 9, data[:-1])


def toy_runner(arena: Arena | None, cache: KVCache, decoder: ToyDecoder) -> Runner:
    return Runner(decoder, cache, max_blocks_per_request=4, draw_seed=lambda: 0, arena=arena)  # type: ignore[arg-type]


def toy_parts() -> tuple[ToyDecoder, KVCache, Arena]:
    decoder = ToyDecoder()
    return decoder, *filled(decoder.kv_format)


def test_a_plan_saves_then_copies_then_restores() -> None:
    """A block that is saved may be copied onto in the same plan, and one that was copied from may be restored into."""
    decoder, cache, arena = toy_parts()
    pool, slots = cache.pools[0].clone(), arena.slots[0].clone()
    plan = StepPlan(
        1, (),
        saves=(BlockTransfer(0, 5, 2),),
        copies=(BlockCopy(0, 7, 5), BlockCopy(0, 5, 6, 9)),
        restores=(BlockTransfer(0, 7, 2), BlockTransfer(0, 1, 4)),
    )  # fmt: skip
    result = toy_runner(arena, cache, decoder).run(plan)
    slots[2] = pool[5]
    expected_cache = KVCache(decoder.kv_format, (pool,))
    decoder.ops.copy_block(expected_cache, 0, 7, 5, BLOCK_SIZE)
    decoder.ops.copy_block(expected_cache, 0, 5, 6, 9)
    pool[7], pool[1] = slots[2], slots[4]
    assert torch.equal(cache.pools[0], pool)
    assert torch.equal(arena.slots[0], slots)
    assert result.samples == result.masses == ()
    assert result.seconds >= result.save_seconds + result.restore_seconds
    assert result.save_seconds > 0 < result.restore_seconds


def test_a_plan_without_transfers_reports_no_time_for_them() -> None:
    decoder, cache, arena = toy_parts()
    result = toy_runner(arena, cache, decoder).run(StepPlan(1, (), copies=(BlockCopy(0, 1, 2, BLOCK_SIZE),)))
    assert result.save_seconds == result.restore_seconds == 0.0


@pytest.mark.parametrize("kind", ["saves", "restores"])
def test_transfers_without_a_ram_tier_are_refused(kind: str) -> None:
    decoder, cache, _ = toy_parts()
    transfers = (BlockTransfer(0, 0, 0),)
    plan = StepPlan(1, (), saves=transfers) if kind == "saves" else StepPlan(1, (), restores=transfers)
    with pytest.raises(AssertionError, match="no RAM tier"):
        toy_runner(None, cache, decoder).run(plan)
