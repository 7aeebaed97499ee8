"""Learnt rates against machines of known speed, and what is decided from them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.scheduler.rates import FIRST_PREFILL_TOKENS, RATE_NAMES, Rates, restore_beats_recompute, step_budget

MACHINE = {"base": 0.020, "decode": 0.001, "prefill": 0.0005}


def step_seconds(num_prefill: int, num_decode: int, machine: dict[str, float] = MACHINE) -> float:
    return machine["base"] + machine["decode"] * num_decode + machine["prefill"] * num_prefill


def teach(rates: Rates, num_steps: int = 40, *, noise: float = 0.0, seed: int = 1) -> None:
    rng = random.Random(seed)
    for _ in range(num_steps):
        factor = 1 + noise * rng.uniform(-1, 1)
        num_decode = rng.randint(1, 16)
        rates.observe_step(0, num_decode, step_seconds(0, num_decode) * factor)
        num_prefill = rng.randint(32, 256)
        rates.observe_step(num_prefill, num_decode, step_seconds(num_prefill, num_decode) * factor)


# --------------------------------------------------------------------------- learning


def test_nothing_is_known_at_first() -> None:
    rates = Rates()
    assert rates.prefill_tokens_per_second is None
    assert rates.save_bytes_per_second is None
    assert rates.restore_bytes_per_second is None
    assert rates.disk_bytes_per_second is None
    assert rates.decode_seconds(4) is None
    assert rates.decode_seconds(0) == 0


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_speed_of_a_linear_machine_is_found(noise: float) -> None:
    rates = Rates()
    teach(rates, noise=noise)
    prefill = rates.prefill_tokens_per_second
    assert prefill is not None
    assert 0.6 * 2000 <= prefill <= 1.1 * 2000
    for num_decodes in range(1, 17):
        seconds = rates.decode_seconds(num_decodes)
        assert seconds == pytest.approx(step_seconds(0, num_decodes), rel=0.2)


def test_decode_time_is_bounded_from_above_where_nothing_was_seen() -> None:
    rates = Rates()
    for num_decodes in (4, 16):
        rates.observe_step(0, num_decodes, step_seconds(0, num_decodes))
    assert rates.decode_seconds(1) == rates.decode_seconds(4) == step_seconds(0, 4)
    assert rates.decode_seconds(10) == pytest.approx(step_seconds(0, 10))
    assert rates.decode_seconds(16) == step_seconds(0, 16)
    assert rates.decode_seconds(32) == pytest.approx(2 * step_seconds(0, 16))


def test_a_mixed_step_before_any_decode_step_is_put_down_to_prefill() -> None:
    rates = Rates()
    rates.observe_step(100, 4, 0.2)
    assert rates.prefill_tokens_per_second == pytest.approx(500)


def test_prefill_that_hides_behind_decoding_has_a_finite_rate() -> None:
    rates = Rates()
    for _ in range(8):
        rates.observe_step(0, 8, 0.02)
        rates.observe_step(16, 8, 0.019)
    prefill = rates.prefill_tokens_per_second
    assert prefill is not None
    assert prefill < 16 / 0.019 * 8 * 2


def test_tiny_chunks_and_steps_without_duration_teach_nothing() -> None:
    rates = Rates()
    rates.observe_step(3, 0, 0.5)
    rates.observe_step(100, 0, 0.0)
    rates.observe_step(0, 0, 0.1)
    rates.observe_save(0, 0.1)
    rates.observe_restore(10, 0.0)
    assert rates.prefill_tokens_per_second is None
    assert rates.decode_seconds(1) is None
    assert rates.restore_bytes_per_second is None


@pytest.mark.parametrize("factor", [1 / 50, 50])
@pytest.mark.parametrize("outlier", [(0, 8), (128, 8), (2000, 0)])
def test_one_odd_step_changes_next_to_nothing(factor: float, outlier: tuple[int, int]) -> None:
    rates = Rates()
    teach(rates, noise=0.05)
    before = step_budget(rates, target_seconds=0.1, max_tokens=2048, num_decodes=8)
    rates.observe_step(*outlier, step_seconds(*outlier) * factor)
    after = step_budget(rates, target_seconds=0.1, max_tokens=2048, num_decodes=8)
    assert 0.8 * before <= after <= 1.25 * before


def test_one_large_odd_chunk_does_not_outvote_many_small_ones() -> None:
    rates = Rates()
    for _ in range(15):
        rates.observe_step(64, 0, 0.064)
    rates.observe_step(4000, 0, 200.0)
    assert rates.prefill_tokens_per_second == pytest.approx(1000)


def test_a_lone_fast_chunk_does_not_open_the_gates() -> None:
    rates = Rates()
    for _ in range(8):
        rates.observe_step(0, 8, 0.02)
        rates.observe_step(120, 8, 0.02 + 120 * 0.0005)
    before = step_budget(rates, target_seconds=0.12, max_tokens=4096, num_decodes=8)
    rates.observe_step(2000, 0, 0.001)
    after = step_budget(rates, target_seconds=0.12, max_tokens=4096, num_decodes=8)
    assert after <= 2 * before


def test_a_lone_slow_chunk_is_forgotten_within_a_window() -> None:
    rates = Rates()
    rates.observe_step(0, 8, 0.02)
    for num_prefill, seconds in ((120, 0.08), (300, 50.0)):
        rates.observe_step(num_prefill, 8, seconds)
    held_back = step_budget(rates, target_seconds=0.12, max_tokens=4096, num_decodes=8)
    assert 120 <= held_back < 140
    for _ in range(32):
        rates.observe_step(120, 8, 0.02 + 120 * 0.0005)
    assert step_budget(rates, target_seconds=0.12, max_tokens=4096, num_decodes=8) == 8 + 200


def test_between_and_beyond_the_sizes_that_were_seen() -> None:
    """(tokens, seconds) of single steps → tokens within a time."""
    for steps, seconds, expected in (
        ([(64, 0.010), (128, 0.010)], 0.015, 192),  # level, and then in proportion
        ([(64, 0.010), (128, 0.030)], 0.020, 96),  # between the two
        ([(64, 0.010), (128, 0.030)], 0.035, 128 + 16),  # as steep as it was last
        ([(120, 0.040), (130, 0.021)], 0.045, 130 + 16.25),  # more tokens never take less
        ([(64, 0.010)], 0.005, 32),
        ([(64, 0.010)], 1.0, 128),  # twice the largest
        ([(8, 0.010)], 1.0, FIRST_PREFILL_TOKENS),
    ):
        rates = Rates()
        for step in steps:
            rates.observe_step(step[0], 0, step[1])
        assert rates.prefill_tokens_within(seconds) == pytest.approx(expected)
    assert Rates().prefill_tokens_within(1.0) is None


def test_a_lasting_change_is_taken_over_within_a_window() -> None:
    rates = Rates()
    teach(rates)
    slow = {name: 4 * value for name, value in MACHINE.items()}
    for _ in range(16):
        rates.observe_step(0, 8, step_seconds(0, 8, slow))
        rates.observe_step(100, 8, step_seconds(100, 8, slow))
    assert rates.prefill_tokens_per_second == pytest.approx(500, rel=0.05)
    assert rates.decode_seconds(8) == pytest.approx(step_seconds(0, 8, slow))


@pytest.mark.parametrize("kind", ["save", "restore", "disk"])
def test_transfers_are_believed_from_the_third_on(kind: str) -> None:
    rates = Rates()
    observe = getattr(rates, f"observe_{kind}")
    for expected in (None, None, 1e9):
        observe(10**9, 1.0)
        assert getattr(rates, f"{kind}_bytes_per_second") == pytest.approx(expected)
    observe(10**9, 100.0)
    assert getattr(rates, f"{kind}_bytes_per_second") == pytest.approx(1e9)
    others = {"save", "restore", "disk"} - {kind}
    assert all(getattr(rates, f"{other}_bytes_per_second") is None for other in others)


def test_fixed_rates_stay() -> None:
    fixed = {name: float(number) for number, name in enumerate(RATE_NAMES, 1)}
    rates = Rates(fixed)
    teach(rates)
    for observe in (rates.observe_save, rates.observe_restore, rates.observe_disk):
        for _ in range(5):
            observe(1000, 1e-6)
    assert rates.prefill_tokens_per_second == fixed["prefill_tokens_per_second"]
    assert rates.save_bytes_per_second == fixed["save_bytes_per_second"]
    assert rates.restore_bytes_per_second == fixed["restore_bytes_per_second"]
    assert rates.disk_bytes_per_second == fixed["disk_bytes_per_second"]
    assert rates.decode_seconds(5) == fixed["decode_base_seconds"] + 5 * fixed["decode_seconds_per_request"]


@pytest.mark.parametrize(
    "fixed", [{"speed": 1.0}, {"decode_base_seconds": 1.0}, {"prefill_tokens_per_second": 0.0}], ids=str
)
def test_what_cannot_be_fixed_is_refused(fixed: dict[str, float]) -> None:
    with pytest.raises(AssertionError):
        Rates(fixed)


# --------------------------------------------------------------------------- the budget of a step

FIXED = {"prefill_tokens_per_second": 2000.0, "decode_base_seconds": 0.02, "decode_seconds_per_request": 0.001}


def budget(rates: Rates, target: float | None, num_decodes: int, max_tokens: int = 2048) -> int:
    return step_budget(rates, target_seconds=target, max_tokens=max_tokens, num_decodes=num_decodes)


def test_the_budget_is_what_fits_into_the_target() -> None:
    rates = Rates(FIXED)
    assert budget(rates, 0.1, 10) == 10 + 140
    assert budget(rates, 0.1, 10, max_tokens=100) == 100
    assert budget(rates, 10.0, 10) == 2048
    assert budget(rates, 0.03, 20) == 20 + 16, "prompts advance though decoding alone takes longer than the target"
    assert budget(rates, 0.03, 20, max_tokens=25) == 25


def test_without_target_or_decodes_there_is_nothing_to_hold_back() -> None:
    for rates in (Rates(), Rates(FIXED)):
        assert budget(rates, None, 10) == 2048
        assert budget(rates, 0.05, 0) == 2048


def test_an_unknown_machine_is_tried_carefully() -> None:
    assert budget(Rates(), 0.1, 10) == 10 + FIRST_PREFILL_TOKENS


def longest_step(machine: dict[str, float], free_tokens: int, target: float, num_steps: int = 300) -> tuple[float, int]:
    """The longest step while a prompt without end runs beside 4 decodes, and the budget at the end.

    The first `free_tokens` prefill tokens of a step cost nothing, as on a machine that waits for its weights.
    """
    rates = Rates()
    longest, tokens = 0.0, 0
    for _ in range(3):
        rates.observe_step(0, 4, step_seconds(0, 4, machine))
    for _ in range(num_steps):
        tokens = budget(rates, target, 4)
        seconds = step_seconds(max(0, tokens - 4 - free_tokens), 4, machine)
        longest = max(longest, seconds)
        rates.observe_step(tokens - 4, 4, seconds)
    return longest, tokens


@pytest.mark.parametrize("free_tokens", [0, 100, 300])
@pytest.mark.parametrize("prefill", [0.0001, 0.0003, 0.0008])
def test_no_step_takes_twice_the_target_and_the_target_is_used(free_tokens: int, prefill: float) -> None:
    machine = MACHINE | {"prefill": prefill}
    longest, tokens = longest_step(machine, free_tokens, target=0.1)
    assert longest < 2 * 0.1
    fitting = 4 + free_tokens + (0.1 - step_seconds(0, 4, machine)) / prefill
    assert tokens >= 0.5 * min(fitting, 2048)


def test_a_long_prompt_that_gets_slower_as_it_grows_keeps_to_the_target() -> None:
    """Attention over 30K tokens makes a prefill token four times as dear as the first one was, and decoding dearer."""
    rates, rng = Rates(), random.Random(5)
    position, gaps = 0, []
    for _ in range(5):
        rates.observe_step(0, 4, step_seconds(0, 4))
    while position < 30_000:
        tokens = budget(rates, 0.1, 4) - 4
        dearer = 1 + 3 * position / 30_000
        seconds = step_seconds(tokens, 4, MACHINE | {"prefill": 0.0005 * dearer}) * rng.uniform(0.9, 1.1)
        rates.observe_step(tokens, 4, seconds)
        gaps.append(seconds)
        position += tokens
    assert max(gaps) < 2 * 0.1
    assert sum(gaps) / len(gaps) > 0.5 * 0.1


@given(st.floats(0.001, 1.0), st.integers(1, 300), st.integers(300, 4096), st.integers(1, 64))
def test_the_budget_stays_within_its_limits(target: float, num_decodes: int, max_tokens: int, least: int) -> None:
    for rates in (Rates(), Rates(FIXED)):
        tokens = step_budget(
            rates,
            target_seconds=target,
            max_tokens=max_tokens,
            num_decodes=num_decodes,
            min_prefill_tokens=least,
        )
        assert min(max_tokens, num_decodes + least) <= tokens <= max_tokens


# --------------------------------------------------------------------------- restore or recompute


def test_the_faster_way_is_taken() -> None:
    rates = Rates(FIXED | {"restore_bytes_per_second": 1e6, "disk_bytes_per_second": 2e6})
    # 1 MB takes 1 s from RAM and 1.5 s from disk; 2500 tokens take 1.25 s.
    assert restore_beats_recompute(rates, 10**6, 2500, from_disk=False)
    assert not restore_beats_recompute(rates, 10**6, 2500, from_disk=True)
    assert not restore_beats_recompute(rates, 10**6, 1999, from_disk=False)


@pytest.mark.parametrize("missing", ["prefill_tokens_per_second", "restore_bytes_per_second", "disk_bytes_per_second"])
def test_what_is_not_measured_yet_is_tried(missing: str) -> None:
    fixed = FIXED | {"restore_bytes_per_second": 1.0, "disk_bytes_per_second": 1.0}
    rates = Rates({name: value for name, value in fixed.items() if name != missing})
    assert restore_beats_recompute(rates, 10**6, 1, from_disk=True)
    assert restore_beats_recompute(rates, 10**6, 1, from_disk=False) is (missing != "disk_bytes_per_second")


@pytest.mark.parametrize("from_disk", [False, True])
def test_a_slow_restore_is_tried_again_some_day(from_disk: bool) -> None:
    rates = Rates(FIXED)
    for _ in range(16):
        rates.observe_restore(1000, 1.0)
        rates.observe_disk(1000, 1.0)
    answers = [restore_beats_recompute(rates, 10**6, 100, from_disk=from_disk) for _ in range(600)]
    assert answers.index(True) > 100
    for _ in range(3):
        rates.observe_restore(10**9, 1.0)
        rates.observe_disk(10**9, 1.0)
    assert restore_beats_recompute(rates, 10**6, 100, from_disk=from_disk)
