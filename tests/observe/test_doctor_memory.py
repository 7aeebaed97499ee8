"""What two token texts have in common, and what the doctor remembers, against plain searches."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from kvd.core import BLOCK_SIZE
from kvd.observe.doctor_memory import HOLDERS, PromptMemory
from kvd.observe.doctor_passages import (
    PASSAGE_TOKENS,
    Passage,
    align,
    block_hash,
    common_length,
    common_length_before,
    decode_ids,
    encode,
    num_moved,
    union_length,
)
from tests.observe.doctor_cases import common, repeated, words

SEEDS = range(30)


def no_pace() -> None:
    return None


def remember(memory: PromptMemory, name: str, prompt: list[int], *, salt: str = "", client: str = "ann") -> None:
    memory.add(name, client, "/v1/chat/completions", salt, 0.0, encode(prompt), no_pace)


def pieces(generator: random.Random, length: int) -> list[int]:
    """Text of few tokens and many repetitions."""
    text: list[int] = []
    while len(text) < length:
        kind = generator.randrange(3)
        if kind == 0 and text:
            begin = generator.randrange(len(text))
            text += text[begin : begin + generator.randint(1, 90)]
        elif kind == 1:
            text += [generator.randrange(3)] * generator.randint(1, 40)
        else:
            text += generator.choices(range(4), k=generator.randint(1, 60))
    return text[:length]


# --------------------------------------------------------------------------- passages


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 4095, 4096, 4097, 10_000])
def test_encoding_and_back(length: int) -> None:
    ids = [number * 7919 % 2**32 for number in range(length)]
    assert decode_ids(encode(ids)) == ids
    assert len(encode(ids)) == 4 * length


@pytest.mark.parametrize("seed", SEEDS)
def test_common_lengths(seed: int) -> None:
    generator = random.Random(seed)
    ours = generator.choices([1, 256, 65536, 2**24, 2**32 - 1], k=generator.randint(0, 3000))
    theirs = list(ours)
    for _ in range(generator.randint(0, 3)):
        if theirs:
            theirs[generator.randrange(len(theirs))] = 3
    theirs = theirs[: generator.randint(0, len(theirs))]
    left, right = encode(ours), encode(theirs)
    assert common_length(left, right) == common(ours, theirs)
    for _ in range(20):
        i, j = generator.randint(0, len(ours)), generator.randint(0, len(theirs))
        assert common_length(left, right, i, j) == common(ours[i:], theirs[j:])
        limit = generator.randint(0, 100)
        before = common(ours[:i][::-1], theirs[:j][::-1])
        assert common_length_before(left, right, i, j, limit) == min(before, limit)


@pytest.mark.parametrize("seed", SEEDS)
def test_aligned_passages_are_equal_long_enough_and_apart(seed: int) -> None:
    generator = random.Random(seed)
    parts = [words(generator, generator.randint(20, 90)) for _ in range(8)]
    texts = [
        [token for number in generator.sample(range(8), 6) for token in [*parts[number], *words(generator, 3)]]
        for _ in range(2)
    ]
    ours, theirs = texts
    passages = align(encode(ours), encode(theirs), 0, no_pace)
    reached = 0
    for passage in passages:
        assert passage.ours >= reached
        assert passage.length >= PASSAGE_TOKENS
        assert ours[passage.ours : passage.end] == theirs[passage.theirs : passage.theirs + passage.length]
        reached = passage.end
    assert sum(passage.length for passage in passages) == repeated([*ours, 0], [theirs], 0)


def chain_weight(passages: list[Passage]) -> int:
    best: list[int] = []
    for at, passage in enumerate(passages):
        before = [best[other] for other in range(at) if passages[other].theirs < passage.theirs]
        best.append(passage.length + max(before, default=0))
    return max(best, default=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_moved_tokens_are_those_outside_the_heaviest_chain(seed: int) -> None:
    generator = random.Random(seed)
    count = generator.randint(0, 40)
    passages = [Passage(at, generator.randrange(50), generator.randint(1, 9)) for at in range(count)]
    once = union_length([(each.theirs, each.theirs + each.length) for each in passages], 0, 100)
    assert num_moved(passages) == max(0, once - chain_weight(passages))


def test_what_is_repeated_has_not_moved() -> None:
    assert num_moved([Passage(0, 0, 3), Passage(9, 3, 50), Passage(59, 3, 50)]) == 0
    assert num_moved([Passage(0, 50, 40), Passage(40, 0, 50)]) == 40


@pytest.mark.parametrize("seed", SEEDS)
def test_union(seed: int) -> None:
    generator = random.Random(seed)
    intervals = [(first := generator.randrange(100), first + generator.randrange(20)) for _ in range(8)]
    begin, end = sorted(generator.sample(range(100), 2))
    expected = {at for first, stop in intervals for at in range(first, stop) if begin <= at < end}
    assert union_length(intervals, begin, end) == len(expected)


# --------------------------------------------------------------------------- memory


@pytest.mark.parametrize("seed", range(100))
def test_matches_cover_exactly_the_passages_that_were_there_before(seed: int) -> None:
    """Of as many prompts as are compared for the same block, in texts that repeat themselves."""
    generator = random.Random(seed)
    memory = PromptMemory(10**6)
    earlier = [pieces(generator, generator.randint(1, 400)) for _ in range(2)]
    for number, prompt in enumerate(earlier):
        remember(memory, str(number), prompt, client=str(number))
    ours = pieces(generator, 200)
    for _ in range(3):
        source = generator.choice(earlier)
        begin = generator.randrange(len(source))
        at = generator.randrange(len(ours))
        ours[at:at] = source[begin : begin + generator.randint(20, 120)]
    cached = generator.randrange(0, 60)
    matches = list(memory.matches("", encode(ours), cached, no_pace))
    for match in matches:
        passage, theirs = match.passage, decode_ids(match.record.data)
        assert passage.length >= PASSAGE_TOKENS
        assert ours[passage.ours : passage.end] == theirs[passage.theirs : passage.theirs + passage.length]
    found = union_length([(match.passage.ours, match.passage.end) for match in matches], cached, len(ours) - 1)
    assert found <= repeated(ours, earlier, cached)
    # A block that one prompt has several times is known by its first place, so a passage may begin or end earlier.
    unique = [words(generator, 300) for _ in range(HOLDERS)]
    for number, prompt in enumerate(unique):
        remember(memory, f"unique-{number}", prompt)
    mixed: list[int] = []
    for _ in range(12):
        source = generator.choice(unique)
        begin = generator.randrange(len(source))
        mixed += [*source[begin : begin + generator.randint(16, 150)], *words(generator, generator.randint(0, 9))]
    intervals = [
        (match.passage.ours, match.passage.end) for match in memory.matches("", encode(mixed), cached, no_pace)
    ]
    assert union_length(intervals, cached, len(mixed) - 1) == repeated(mixed, [*unique, *earlier], cached)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_longest_beginning_is_found_among_many(seed: int) -> None:
    generator = random.Random(seed)
    memory = PromptMemory(10**6)
    earlier = [generator.choices(range(2), k=generator.randint(1, 40)) for _ in range(300)]
    salts = [generator.choice("abc") for _ in earlier]
    for number, (prompt, salt) in enumerate(zip(earlier, salts, strict=True)):
        remember(memory, str(number), prompt, salt=salt, client=str(number))
    ours = generator.choices(range(2), k=30)
    best = {salt: max(common(ours, p) for p, s in zip(earlier, salts, strict=True) if s == salt) for salt in "abc"}
    for salt in "abc":
        assert memory.longest_beginning(salt, encode(ours))[1] == best[salt]
        others = max(best[other] for other in "abc" if other != salt)
        least = generator.randint(1, 12)
        assert memory.beginning_elsewhere(salt, encode(ours), least)[1] == (others if others >= least else 0)


def test_a_chat_takes_the_room_of_its_longest_turn() -> None:
    generator = random.Random(1)
    memory = PromptMemory(10**6)
    prompt = words(generator, 100)
    for number in range(20):
        remember(memory, str(number), prompt)
        memory.answered(str(number), encode(answer := words(generator, 10)), no_pace)
        prompt = [*prompt, *answer, *words(generator, 40)]
    assert len(memory) == 1
    assert memory.num_tokens < len(prompt) + 100
    record, length = memory.longest_beginning("", encode(prompt))
    assert record is not None
    assert length == len(prompt) - 40
    assert [record.num_longer(at) for at in (0, 100, 150, 1049, 1050)] == [20, 19, 18, 1, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_oldest_prompts_go_and_leave_nothing_behind(seed: int) -> None:
    generator = random.Random(seed)
    memory = PromptMemory(5000)
    shared = words(generator, 64)
    for number in range(200):
        salt = generator.choice(["", "x", "y"])
        prompt = [*shared[: generator.choice([0, 32, 64])], *pieces(generator, generator.randint(1, 300))]
        remember(memory, str(number), prompt, salt=salt, client=generator.choice("ab"))
        if generator.randrange(2):
            memory.answered(str(number), encode(words(generator, 20)), no_pace)
        assert memory.num_tokens <= 5000
    shelves = memory._shelves.values()
    for shelf in shelves:
        assert shelf.texts == sorted(shelf.texts) == [record.data for record in shelf.records]
        blocks = {
            decode_ids(record.data[4 * at : 4 * (at + BLOCK_SIZE)]).__repr__()
            for record in shelf.records
            for at in range(0, len(record.data) // 4 - BLOCK_SIZE + 1, BLOCK_SIZE)
        }
        assert sum(map(len, shelf.blocks)) <= len(blocks)
        for shard in shelf.blocks:
            for key in shard:
                for record, place in memory._holders(shelf, key):
                    assert record in shelf.records
                    assert block_hash(record.data, place) == key
    assert sum(len(shelf.records) for shelf in shelves) == len(memory)
    remember(memory, "huge", words(generator, 6000))
    assert memory.longest_beginning("", encode(words(generator, 6000)))[1] == 0
    assert memory.num_tokens <= 5000


def test_memory_in_bytes_is_bounded_by_the_tokens() -> None:
    generator = random.Random(2)
    memory = PromptMemory(60_000)
    tracemalloc.start()
    try:
        for number in range(40):
            remember(memory, str(number), words(generator, 3000))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 24 * 60_000
