"""Every cause, from prompts that were made for it: what the doctor says is what the generator knows."""

from __future__ import annotations

import random

import pytest

from kvd.insight import EvictedNote, Miss
from kvd.observe.doctor_memory import HOLDERS
from tests.observe.doctor_cases import NEW_LINE, SPACE, TAB, Clinic, joined, repeated, text, words

SEEDS = range(40)


def last_miss(clinic: Clinic) -> Miss:
    clinic.wait()
    miss = clinic.doctor.report(0).recent[0]
    assert miss.request_id == f"request-{clinic.num_requests}"
    return miss


def has_no_miss(clinic: Clinic) -> bool:
    clinic.wait()
    return all(miss.request_id != f"request-{clinic.num_requests}" for miss in clinic.doctor.report(0).recent)


@pytest.mark.parametrize("seed", SEEDS)
def test_volatile_line(clinic: Clinic, seed: int) -> None:
    generator = random.Random(seed)
    head = text(generator, generator.randint(1, 300))
    label = words(generator, generator.randint(0, 12))
    tail = [NEW_LINE, *text(generator, generator.randint(32, 3000))]
    length = generator.randint(1, 40)
    num_earlier = generator.randint(2, 60)

    def prompt() -> list[int]:
        return [*head, *label, *words(generator, length), *tail, *words(generator, generator.randint(1, 60))]

    for _ in range(num_earlier):
        clinic.admit(prompt(), client=generator.choice(["ann", "bob"]))
    clinic.admit(prompt())
    miss = last_miss(clinic)
    position = len(head) + len(label)
    assert miss.cause == "volatile_line"
    assert (miss.position, miss.num_alike, miss.lost_tokens) == (position, num_earlier, len(tail))
    assert miss.words == (
        f"differs from {num_earlier} earlier requests at token {position:,}; "
        f"{len(tail):,} equal tokens after it were recomputed"
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_volatile_line_whose_beginning_is_the_same_by_chance(clinic: Clinic, seed: int) -> None:
    """Digits of a date: the position is where the first of the earlier ones differs, and the tail is what is lost."""
    generator = random.Random(seed)
    head, tail = text(generator, generator.randint(20, 100)), [NEW_LINE, *text(generator, 500)]
    digits = words(generator, 2)
    stamps = list(dict.fromkeys(tuple(generator.choices(digits, k=6)) for _ in range(20)))
    for stamp in stamps:
        clinic.admit([*head, *stamp, *tail, *words(generator, 5)])
    miss = last_miss(clinic)
    *earlier, own = stamps
    differ = [next(at for at in range(6) if own[at] != other[at]) for other in earlier]
    assert miss.cause == "volatile_line"
    assert (miss.position, miss.num_alike) == (len(head) + min(differ), len(earlier))
    assert miss.num_cached_tokens == len(head) + max(differ)
    *prompts, prompt = clinic.cached[""]
    # The last digits may be equal, too, in earlier prompts that newer ones hide.
    least, most = (repeated(prompt, those, miss.num_cached_tokens) for those in (prompts[-HOLDERS:], prompts))
    assert len(tail) <= least <= miss.lost_tokens <= most


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cause", ["system_prompt", "differs"])
def test_a_text_that_differs(clinic: Clinic, seed: int, cause: str) -> None:
    generator = random.Random(seed)
    begin = text(generator, generator.randint(1, 60) if cause == "system_prompt" else generator.randint(64, 2000))
    tail = text(generator, generator.randint(100, 2000))
    num_earlier = generator.randint(1, 5)
    for _ in range(num_earlier + 1):
        differing = text(generator, generator.randint(66, 500))
        clinic.admit([*begin, *differing, *tail, *words(generator, generator.randint(6, 90))])
    miss = last_miss(clinic)
    assert miss.cause == cause
    *prompts, prompt = clinic.cached[""]
    lost = repeated(prompt, prompts, miss.num_cached_tokens)
    assert lost > len(tail)  # texts end with a new line, so that the last token of what differs is equal too
    assert (miss.position, miss.num_alike, miss.lost_tokens) == (len(begin), num_earlier, lost)


@pytest.mark.parametrize("seed", SEEDS)
def test_reordered(clinic: Clinic, seed: int) -> None:
    generator = random.Random(seed)
    head = text(generator, generator.randint(20, 300))
    documents = [words(generator, generator.randint(32, 400)) for _ in range(generator.randint(2, 7))]
    clinic.admit([*head, *joined(documents), *words(generator, 30)])
    order = list(range(len(documents)))
    while order == sorted(order):
        generator.shuffle(order)
    clinic.admit([*head, *joined(documents[number] for number in order), *words(generator, 30)])
    miss = last_miss(clinic)
    kept = next(at for at, number in enumerate(order) if at != number)
    lost = sum(len(documents[number]) for number in order[kept:])
    position = len(head) + sum(len(documents[number]) for number in order[:kept])
    assert (miss.cause, miss.position, miss.lost_tokens) == ("reordered", position, lost)


@pytest.mark.parametrize("seed", SEEDS)
def test_white_space(clinic: Clinic, seed: int) -> None:
    generator = random.Random(seed)
    head, tail = text(generator, generator.randint(1, 300)), text(generator, generator.randint(40, 3000))
    ours, theirs = generator.sample([[NEW_LINE], [SPACE], [TAB, TAB], [SPACE, NEW_LINE], []], 2)
    clinic.admit([*head, *theirs, *tail, *words(generator, 30)])
    clinic.admit([*head, *ours, *tail, *words(generator, 30)])
    miss = last_miss(clinic)
    same = miss.num_cached_tokens
    assert (miss.cause, miss.position) == ("white_space", same)
    assert len(head) <= same <= len(head) + 1
    assert miss.lost_tokens == len(head) + len(ours) + len(tail) - same


@pytest.mark.parametrize("seed", SEEDS)
def test_white_space_in_every_line(clinic: Clinic, seed: int) -> None:
    """No passage is long enough to be found, yet all could have been reused."""
    generator = random.Random(seed)
    head = text(generator, generator.randint(1, 200))
    lines = [words(generator, generator.randint(5, 20)) for _ in range(generator.randint(10, 150))]
    clinic.admit([*head, *joined([*line, NEW_LINE] for line in lines)])
    prompt = [*head, *joined([*line, SPACE, NEW_LINE] for line in lines), *words(generator, 10)]
    clinic.admit(prompt)
    miss = last_miss(clinic)
    position = len(head) + len(lines[0])
    assert (miss.cause, miss.position) == ("white_space", position)
    assert miss.lost_tokens == len(prompt) - 10 - position


@pytest.mark.parametrize("seed", SEEDS)
def test_history_without_the_reasoning(clinic: Clinic, seed: int) -> None:
    """The template drops what was thought in the earlier turn; the answer behind it is computed again."""
    generator = random.Random(seed)
    first = text(generator, generator.randint(10, 500))
    thought, answer = text(generator, generator.randint(4, 400)), words(generator, generator.randint(33, 300))
    clinic.admit(first, answer=[*thought, *answer])
    clinic.admit([*first, *answer, *text(generator, generator.randint(10, 100))])
    miss = last_miss(clinic)
    assert (miss.cause, miss.position, miss.lost_tokens) == ("history_rewritten", len(first), len(answer) - 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_history_without_an_early_turn(clinic: Clinic, seed: int) -> None:
    generator = random.Random(seed)
    system = text(generator, generator.randint(5, 200))
    turns = [text(generator, generator.randint(40, 200)) for _ in range(generator.randint(3, 6))]
    for number in range(1, len(turns)):
        clinic.admit([*system, *joined(turns[:number])])
    num_dropped = generator.randint(1, len(turns) - 2)
    clinic.admit([*system, *joined(turns[num_dropped:])])
    miss = last_miss(clinic)
    lost = sum(map(len, turns[num_dropped:-1]))
    assert (miss.cause, miss.position, miss.lost_tokens) == ("history_rewritten", len(system), lost)


@pytest.mark.parametrize("seed", SEEDS)
def test_history_that_was_summed_up(clinic: Clinic, seed: int) -> None:
    generator = random.Random(seed)
    system = text(generator, generator.randint(64, 200))
    early, late = text(generator, generator.randint(40, 600)), text(generator, generator.randint(40, 600))
    clinic.admit([*system, *early, *late])
    summary = text(generator, generator.randint(66, 200))
    clinic.admit([*system, *summary, *late, *text(generator, 60)])
    miss = last_miss(clinic)
    assert (miss.cause, miss.position, miss.lost_tokens) == ("history_rewritten", len(system), len(late) + 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_chat_that_goes_on_is_no_miss(clinic: Clinic, seed: int) -> None:
    generator = random.Random(seed)
    prompt = text(generator, generator.randint(17, 300))
    clinic.admit(prompt)
    for _ in range(4):
        prompt = [*prompt, *text(generator, generator.randint(1, 200))]
        clinic.admit(prompt)
        assert has_no_miss(clinic)
    assert {cause: number for cause, number, _ in clinic.doctor.counts()}["new"] == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_evicted(clinic: Clinic, seed: int) -> None:
    generator = random.Random(seed)
    prompt = text(generator, generator.randint(100, 3000))
    clinic.admit(prompt)
    kept = generator.randrange(0, len(prompt) - 40)
    gone = generator.randint(1, len(prompt) - kept - 1)
    note = EvictedNote("bob", 75.0, 4000.0, gone)
    clinic.admit([*prompt[: kept + gone], *words(generator, 50)], num_cached=kept, evicted=note)
    miss = last_miss(clinic)
    assert (miss.cause, miss.lost_tokens) == ("evicted", gone)
    assert miss.words.endswith(
        f"{'token' if gone == 1 else 'tokens'} had been evicted for bob 75 s ago, after 67 min unused"
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_beginning_that_is_not_cached_any_more(clinic: Clinic, seed: int) -> None:
    generator = random.Random(seed)
    prompt = text(generator, generator.randint(100, 3000))
    clinic.admit(prompt)
    kept = generator.randrange(0, len(prompt) - 40)
    clinic.admit([*prompt, *words(generator, 50)], num_cached=kept)
    miss = last_miss(clinic)
    assert (miss.cause, miss.lost_tokens) == ("evicted", len(prompt) - kept)
    assert "not in the cache any more" in miss.words


@pytest.mark.parametrize("seed", SEEDS)
def test_other_salt(clinic: Clinic, seed: int) -> None:
    generator = random.Random(seed)
    prompt = text(generator, generator.randint(32, 3000))
    for number in range(generator.randint(1, 5)):
        clinic.admit([*prompt, *words(generator, 20)], salt=f"other-{number}")
    own = generator.randint(0, len(prompt) - 32)
    clinic.admit([*prompt[:own], *words(generator, 40)], salt="ours")
    clinic.admit([*prompt, *words(generator, 20)], salt="ours")
    miss = last_miss(clinic)
    assert (miss.cause, miss.lost_tokens) == ("other_salt", len(prompt) - own)


@pytest.mark.parametrize("seed", SEEDS)
def test_other_format(clinic: Clinic, seed: int) -> None:
    generator = random.Random(seed)
    clinic.admit(text(generator, generator.randint(32, 300)), other_format="int8", num_cached=0)
    miss = last_miss(clinic)
    assert (miss.cause, miss.lost_tokens) == ("other_format", 0)
    assert "KV format int8" in miss.words


@pytest.mark.parametrize("seed", SEEDS)
def test_too_short(clinic: Clinic, seed: int) -> None:
    generator = random.Random(seed)
    short = words(generator, generator.randint(1, 31))
    clinic.admit([*short, *words(generator, 100)])
    clinic.admit([*short, *words(generator, 100)], num_cached=0)
    miss = last_miss(clinic)
    assert (miss.cause, miss.position, miss.lost_tokens) == ("too_short", len(short), 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_new(clinic: Clinic, seed: int) -> None:
    generator = random.Random(seed)
    number = generator.randint(1, 20)
    for _ in range(number):
        clinic.admit(words(generator, generator.randint(2, 500)))
    clinic.wait()
    report = clinic.doctor.report(0)
    assert [counts for counts in report.by_cause if counts[1]] == [("new", number, 0)]
    assert not report.recent
    assert not report.findings


def test_a_prompt_of_which_nothing_more_could_be_found_is_no_miss(clinic: Clinic) -> None:
    """Its last token is always computed, so that of a single one nothing can be cached."""
    prompt = words(random.Random(0), 9)
    for num_cached in (0, 8):
        clinic.admit(prompt, num_cached=num_cached)
    clinic.admit([prompt[-1]])
    clinic.wait()
    report = clinic.doctor.report(0)
    assert report.num_examined == 3
    assert [counts for counts in report.by_cause if counts[1]] == [("new", 1, 0)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_text_that_was_put_in_is_not_reordered(clinic: Clinic, seed: int) -> None:
    """It ends with a new line as what stands before it does."""
    generator = random.Random(seed)
    begin, tail = text(generator, generator.randint(1, 60)), text(generator, generator.randint(100, 2000))
    clinic.admit([*begin, *tail, *words(generator, 30)])
    clinic.admit([*begin, *text(generator, generator.randint(66, 500)), *tail, *words(generator, 30)])
    miss = last_miss(clinic)
    assert (miss.cause, miss.position) == ("system_prompt", len(begin))
    assert miss.lost_tokens >= len(tail)


def test_a_passage_that_stands_there_twice_is_not_reordered(clinic: Clinic) -> None:
    generator = random.Random(0)
    begin, passage = text(generator, 3), text(generator, 200)
    clinic.admit([*begin, *passage, *words(generator, 30)])
    clinic.admit([*begin, *text(generator, 70), *passage, *passage, *words(generator, 30)])
    assert last_miss(clinic).cause == "system_prompt"
    clinic.admit([*begin, *text(generator, 70), *words(generator, 9), *passage[5:], *passage, *words(generator, 30)])
    assert last_miss(clinic).cause == "system_prompt"


def test_an_excused_request_is_neither_examined_for_misses_nor_remembered(clinic: Clinic) -> None:
    generator = random.Random(0)
    prompt = text(generator, 300)
    clinic.admit(prompt, excused="prompt logprobs")
    clinic.admit(prompt, num_cached=0)
    clinic.wait()
    report = clinic.doctor.report(0)
    assert report.num_examined == 2
    assert report.lost_tokens == 0
    assert report.prompt_tokens == 300
