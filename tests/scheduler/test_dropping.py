"""What a request forgets: the three rules, the budget, and that interruptions change nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core import BLOCK_SIZE, KVEviction
from kvd.scheduler.dropping import MIN_BUDGET_BLOCKS, DropSchedule

MODES: tuple[KVEviction, ...] = ("sliding_window", "streaming", "heavy_hitter")


def mass_of(query: int, number: int) -> float:
    """Whole numbers, so that no sum depends on its order; some blocks matter to everybody, all to their neighbours."""
    age = query // BLOCK_SIZE - number
    return float((97 * number + 31) % 61 + (200 if age < 2 else 0) + (query * number) % 7)


class Sequence_:
    """A request that holds blocks as the cache manager has it."""

    def __init__(self, schedule: DropSchedule) -> None:
        self.schedule = schedule
        self.numbers: list[int] = []
        self.position = 0
        self.seen: dict[int, tuple[int, ...]] = {}  # position → blocks that its query saw

    def compute(self, num_tokens: int) -> None:
        """One step from the present position; at most `num_tokens` tokens."""
        schedule, start = self.schedule, self.position
        end = min(start + num_tokens, schedule.limit(start))
        if schedule.is_due(start, self.numbers):
            dropped = schedule.due(start, self.numbers)
            assert dropped
            assert set(dropped) <= set(self.numbers)
            self.numbers = [number for number in self.numbers if number not in dropped]
        assert not schedule.is_due(start, self.numbers), "asked again, nothing is left to do"
        assert schedule.due(start, self.numbers) == ()
        for number in range(start // BLOCK_SIZE, (end - 1) // BLOCK_SIZE + 1):
            if number not in self.numbers:
                self.numbers.append(number)
        for position in range(start, end):
            visible = tuple(number for number in self.numbers if number <= position // BLOCK_SIZE)
            assert self.seen.setdefault(position, visible) == visible, "computed anew, a token sees something else"
        if schedule.wants_mass:
            masses = [sum(mass_of(query, n) for query in range(start, end) if query >= n * 16) for n in self.numbers]
            schedule.accumulate(self.numbers, masses, end)
        self.position = end

    def preempt(self, num_cached: int) -> None:
        """Start over, with so many tokens from a cache."""
        self.numbers = [*range(num_cached // BLOCK_SIZE)]
        self.position = num_cached


def run(schedule: DropSchedule, num_tokens: int, chunk: Callable[[], int]) -> Sequence_:
    sequence = Sequence_(schedule)
    while sequence.position < num_tokens:
        sequence.compute(min(chunk(), num_tokens - sequence.position))
        assert len(sequence.numbers) <= schedule.budget_blocks
    return sequence


# --------------------------------------------------------------------------- which blocks


def test_nothing_is_dropped_within_the_budget() -> None:
    for mode in MODES:
        schedule = DropSchedule(mode, 16)
        sequence = run(schedule, 256, lambda: 7)
        assert sequence.numbers == [*range(16)]
        assert schedule.events == []
        assert schedule.num_dropped_tokens == 0


def test_a_sliding_window_keeps_the_newest() -> None:
    sequence = run(DropSchedule("sliding_window", 16), 256 + 3 * 32, lambda: 64)
    assert sequence.schedule.events == [(256, (0, 1)), (288, (2, 3)), (320, (4, 5))]
    assert sequence.numbers == [*range(6, 22)]
    assert sequence.schedule.num_dropped_tokens == 96


@pytest.mark.parametrize(("num_sink_tokens", "num_sinks"), [(0, 0), (4, 1), (16, 1), (17, 2)])
def test_streaming_keeps_the_sinks_and_the_newest(num_sink_tokens: int, num_sinks: int) -> None:
    sequence = run(DropSchedule("streaming", 16, num_sink_tokens=num_sink_tokens), 256 + 64, lambda: 64)
    assert sequence.numbers == [*range(num_sinks), *range(num_sinks + 4, 20)]


def test_a_heavy_hitter_keeps_sinks_the_newer_half_and_what_got_the_most_attention() -> None:
    schedule = DropSchedule("heavy_hitter", 16)
    masses = dict.fromkeys(range(16), 10.0) | {0: 0.0, 3: 90.0, 4: 1.0, 6: 2.0, 12: 0.0}
    schedule.accumulate([*masses], [*masses.values()], 256)
    assert schedule.due(256, range(16)) == (4, 6)
    assert schedule.events == [(256, (4, 6))]


def test_of_equal_attention_the_older_block_stays() -> None:
    schedule = DropSchedule("heavy_hitter", 16)
    schedule.accumulate(range(16), [1.0] * 16, 256)
    assert schedule.due(256, range(16)) == (6, 7)


def test_old_attention_fades() -> None:
    """Block 2 got much once, block 3 gets a little all the time: after some drops block 3 is worth more."""
    schedule = DropSchedule("heavy_hitter", 16)
    numbers = [*range(16)]
    schedule.accumulate(numbers, [40.0 if number == 2 else 30.0 for number in numbers], 256)
    dropped: list[int] = []
    for position in range(256, 256 + 32 * 8, 32):
        gone = schedule.due(position, numbers)
        dropped += gone
        numbers = [number for number in numbers if number not in gone]
        numbers += [position // BLOCK_SIZE, position // BLOCK_SIZE + 1]
        schedule.accumulate(numbers, [0.0 if number == 2 else 30.0 for number in numbers], position + 32)
    assert 2 in dropped
    assert 3 not in dropped


def test_age_alone_does_not_win() -> None:
    """Everybody gets the same from each query: after a hundred drops not only the first blocks are left."""
    schedule = DropSchedule("heavy_hitter", 32)
    rng = random.Random(3)
    numbers = [*range(32)]
    schedule.accumulate(numbers, [rng.random() for _ in numbers], 512)
    for position in range(512, 512 + 64 * 100, 64):
        gone = schedule.due(position, numbers)
        numbers = [number for number in numbers if number not in gone]
        numbers += range(position // BLOCK_SIZE, position // BLOCK_SIZE + 4)
        schedule.accumulate(numbers, [64 * rng.uniform(0.9, 1.1) for _ in numbers], position + 64)
    middle = numbers[1:16]
    assert sum(number > 200 for number in middle) >= 5


# --------------------------------------------------------------------------- when


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget_blocks", [MIN_BUDGET_BLOCKS, 5, 7, 8, 16, 33, 100])
def test_the_budget_holds_and_chunks_stay_long(mode: KVEviction, budget_blocks: int) -> None:
    num_tokens = BLOCK_SIZE * budget_blocks * 4
    chunks = 0

    def whole() -> int:
        nonlocal chunks
        chunks += 1
        return num_tokens

    schedule = DropSchedule(mode, budget_blocks)
    sequence = run(schedule, num_tokens, whole)
    if mode == "heavy_hitter":  # where attention counts, every block of a prompt is a chunk
        assert chunks == 1 + 3 * budget_blocks + schedule.stride_blocks
    else:
        assert chunks <= 2 + -(-3 * budget_blocks // schedule.stride_blocks)
    assert len(sequence.numbers) == budget_blocks - (-3 * budget_blocks) % schedule.stride_blocks
    newest = max(1, budget_blocks // 2 if mode == "heavy_hitter" else budget_blocks - schedule.stride_blocks - 1)
    last = num_tokens // BLOCK_SIZE
    assert sequence.numbers[-newest:] == [*range(last - newest, last)]
    assert (0 in sequence.numbers) == (mode != "sliding_window")


def test_a_chunk_ends_before_the_next_drop() -> None:
    for mode in ("sliding_window", "streaming"):
        schedule = DropSchedule(mode, 16)
        assert [schedule.limit(start) for start in (0, 255, 256, 287, 288, 1000)] == [256, 256, 288, 288, 320, 1024]
    schedule = DropSchedule("heavy_hitter", 16)
    assert [schedule.limit(start) for start in (0, 223, 224, 255, 256)] == [224, 224, 240, 256, 272]


def test_a_chunk_ends_where_attention_has_been_counted() -> None:
    schedule = DropSchedule("heavy_hitter", 16)
    schedule.accumulate(range(15), [1.0] * 15, 235)
    assert [schedule.limit(start) for start in (0, 224, 235, 240)] == [224, 235, 240, 256]


@pytest.mark.parametrize("mode", MODES)
def test_a_request_whose_windows_left_little_to_drop_drops_less(mode: KVEviction) -> None:
    schedule = DropSchedule(mode, 16)
    assert schedule.due(256, range(4, 16)) == ()
    assert schedule.events == []
    schedule.accumulate(range(2, 17), [1.0] * 15, 288)
    assert len(schedule.due(288, range(2, 17))) == 1


def test_a_drop_is_not_decided_before_all_attention_is_known() -> None:
    schedule = DropSchedule("heavy_hitter", 16)
    schedule.accumulate(range(16), [1.0] * 16, 255)
    assert schedule.is_due(256, range(16))
    with pytest.raises(AssertionError, match="not known"):
        schedule.due(256, range(16))


@pytest.mark.parametrize("mode", MODES)
def test_what_cannot_be_kept_is_refused(mode: KVEviction) -> None:
    with pytest.raises(AssertionError, match="too few"):
        DropSchedule(mode, MIN_BUDGET_BLOCKS - 1)
    with pytest.raises(AssertionError):
        DropSchedule("none", 16)
    if mode != "sliding_window":
        with pytest.raises(AssertionError, match="too many sinks"):
            DropSchedule(mode, 8, num_sink_tokens=64)


# --------------------------------------------------------------------------- the same whatever happens


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(MODES),
    st.sampled_from([4, 6, 16, 24]),
    st.integers(1, 900),
    st.integers(0, 2**32),
)
def test_chunks_hits_and_preemptions_change_nothing(
    mode: KVEviction, budget_blocks: int, num_tokens: int, seed: int
) -> None:
    alone = run(DropSchedule(mode, budget_blocks), num_tokens, lambda: 1)
    rng = random.Random(seed)
    schedule = DropSchedule(mode, budget_blocks)
    sequence = Sequence_(schedule)
    sequence.preempt(rng.randrange(min(num_tokens - 1, schedule.max_matched_tokens) // BLOCK_SIZE + 1) * BLOCK_SIZE)
    num_preemptions = 0
    while sequence.position < num_tokens:
        if rng.random() < 0.05 and num_preemptions < 6:
            num_preemptions += 1
            cacheable = min(sequence.position, schedule.max_matched_tokens) // BLOCK_SIZE
            sequence.preempt(rng.randrange(cacheable + 1) * BLOCK_SIZE)
        sequence.compute(min(rng.choice((1, 1, 5, 40, 300)), num_tokens - sequence.position))
        assert len(sequence.numbers) <= budget_blocks
    assert schedule.events == alone.schedule.events
    assert schedule.num_dropped_tokens == alone.schedule.num_dropped_tokens
    assert sequence.numbers == alone.numbers
    assert all(alone.seen[position] == seen for position, seen in sequence.seen.items())


def test_attention_told_twice_counts_once() -> None:
    def dropped(tell: Callable[[DropSchedule, Sequence[int]], None]) -> tuple[int, ...]:
        schedule = DropSchedule("heavy_hitter", 16)
        schedule.accumulate(range(15), [5.0] * 15, 240)
        tell(schedule, range(15))
        schedule.accumulate(range(16), [1.0] * 16, 256)
        return schedule.due(256, range(16))

    once = dropped(lambda schedule, numbers: None)
    assert dropped(lambda schedule, numbers: schedule.accumulate(numbers, [n * 9.0 for n in numbers], 240)) == once
    assert dropped(lambda schedule, numbers: schedule.accumulate(numbers, [n * 9.0 for n in numbers], 241)) != once
