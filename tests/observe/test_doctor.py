"""The doctor as a whole: its report, its thread, and that everything it does is bounded."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from kvd.insight import Admission, DoctorReport
from kvd.observe import doctor as doctor_module
from kvd.observe.doctor import Doctor
from kvd.observe.doctor_findings import MAX_KINDS, MAX_RECENT
from kvd.observe.doctor_words import ADVICE, CAUSES
from tests.observe.doctor_cases import ENDPOINT, NEW_LINE, WAIT_SECONDS, Clinic, decode, joined, text, words


def dated(generator: random.Random, head: Sequence[int], tail: Sequence[int]) -> list[int]:
    return [*head, *words(generator, 4), NEW_LINE, *tail, *words(generator, 20)]


def admission(name: str, prompt: Sequence[int], num_cached: int = 0) -> Admission:
    return Admission(name, "ann", ENDPOINT, "", time.monotonic(), tuple(prompt), num_cached)


# --------------------------------------------------------------------------- the report


def test_findings_are_ranked_by_lost_tokens_and_say_what_they_cost(clinic: Clinic) -> None:
    generator = random.Random(1)
    kinds = [(text(generator, 20), text(generator, length), client) for length, client in ((80, "ann"), (900, "bob"))]
    for head, tail, client in kinds:
        for _ in range(5):
            clinic.admit(dated(generator, head, tail), client=client)
    clinic.wait()
    report = clinic.doctor.report(200.0)
    lines = [finding for finding in report.findings if finding.cause == "volatile_line"]
    lost = [3 * (len(tail) + 1) for _, tail, _ in kinds]
    assert [(found.client, found.lost_tokens, found.num_requests) for found in lines] == [
        ("bob", lost[1], 3), ("ann", lost[0], 3)
    ]  # fmt: skip
    assert lines[0].saved_seconds == lost[1] / 200
    assert lines[0].position == 20
    assert lines[0].words == (
        f"one line differs from 4 earlier requests at token 20; {lost[1]:,} equal tokens after it were recomputed"
    )
    assert lines[0].advice == ADVICE["volatile_line"]
    losses = [finding.lost_tokens for finding in report.findings]
    assert losses == sorted(losses, reverse=True)
    assert sum(losses) == report.lost_tokens == sum(lost for _, _, lost in report.by_cause)
    assert [miss.request_id for miss in report.recent][:2] == ["request-10", "request-9"]
    assert report.num_examined == 10
    assert clinic.doctor.report(0).findings[0].saved_seconds == 0


def test_a_report_is_what_its_json_says(clinic: Clinic) -> None:
    generator = random.Random(2)
    head, tail = text(generator, 20), text(generator, 80)
    for _ in range(4):
        clinic.admit(dated(generator, head, tail))
    clinic.wait()
    report = clinic.doctor.report(100.0)
    assert msgspec.json.decode(msgspec.json.encode(report), type=DoctorReport) == report
    assert [cause for cause, _, _ in clinic.doctor.counts()] == list(CAUSES)
    assert all(abs(miss.time - time.time()) < 1e9 for miss in report.recent)


def test_no_text_of_a_prompt_is_in_a_report(clinic: Clinic) -> None:
    generator = random.Random(3)
    head, tail = text(generator, 20), text(generator, 80)
    for _ in range(5):
        clinic.admit(dated(generator, head, tail))
    clinic.wait()
    assert b"w1" not in msgspec.json.encode(clinic.doctor.report(100.0))


def test_revealed_texts_show_the_place_where_they_differ(clinic: Clinic) -> None:
    generator = random.Random(4)
    head, tail = text(generator, 2000), text(generator, 2000)
    for _ in range(4):
        clinic.admit(dated(generator, head, tail))
    clinic.wait()
    finding = clinic.doctor.report(0).findings[0]
    shown = clinic.doctor.reveal(finding.example_id)
    assert shown is not None
    number = int(finding.example_id.removeprefix("request-")) - 1
    ours = clinic.cached[""][number]
    theirs = [prompt for at, prompt in enumerate(clinic.cached[""]) if at != number]
    begin, end = finding.position - 8, finding.position + 12
    assert decode(ours[begin:end]) in shown.ours
    assert any(decode(other[begin:end]) in shown.theirs for other in theirs)
    assert len(shown.ours) < 200 * 12
    assert finding.example_id in shown.title
    assert clinic.doctor.reveal("request-77") is None


def test_reset_forgets_findings_and_prompts(clinic: Clinic) -> None:
    generator = random.Random(5)
    head, tail = text(generator, 20), text(generator, 80)
    for _ in range(4):
        clinic.admit(dated(generator, head, tail))
    clinic.doctor.reset()
    report = clinic.doctor.report(0)
    assert not report.findings
    assert report.num_examined == report.lost_tokens == 0
    clinic.admit(dated(generator, head, tail), num_cached=0)
    clinic.wait()
    report = clinic.doctor.report(0)
    assert [counts for counts in report.by_cause if counts[1]] == [("new", 1, 0)]


# --------------------------------------------------------------------------- bounds


def test_misses_of_more_kinds_than_are_kept(clinic: Clinic) -> None:
    generator = random.Random(6)
    prompt = text(generator, 200)
    clinic.admit(prompt)
    for number in range(MAX_KINDS + 50):
        clinic.admit(prompt[: 100 + number % 50], num_cached=0, client=f"client-{number}")
    clinic.wait()
    report = clinic.doctor.report(0)
    assert len(report.findings) == MAX_KINDS
    assert len(report.recent) == MAX_RECENT
    assert report.lost_tokens == sum(99 + number % 50 for number in range(MAX_KINDS + 50))


def test_thousands_of_short_prompts(clinic: Clinic) -> None:
    generator = random.Random(7)
    for _ in range(3000):
        clinic.admit(generator.choices(range(10, 20), k=generator.randint(0, 12)), num_cached=0)
    clinic.wait()
    report = clinic.doctor.report(0)
    assert report.num_examined == 3000
    assert report.lost_tokens == 0


@pytest.mark.parametrize("period", [1, 2, 7, 16, 31, 1000])
def test_long_periodic_prompts(clinic: Clinic, period: int) -> None:
    generator = random.Random(period)
    pattern = words(generator, period)
    prompt = (pattern * (100_000 // period + 1))[:100_000]
    other = words(generator, 50)
    clinic.admit(prompt)
    clinic.admit([*other, *prompt])
    clinic.admit(prompt[:-1], num_cached=16)
    clinic.wait()
    report = clinic.doctor.report(0)
    assert report.num_examined == 3
    # Behind another beginning: all but the last token, which is always computed.
    assert [miss.lost_tokens for miss in report.recent] == [100_000 - 1 - 1 - 16, 100_000 - 1]


def test_two_long_texts_of_the_same_short_pieces(clinic: Clinic) -> None:
    """Every block is known, and no passage is long enough."""
    generator = random.Random(8)
    runs = [[token] * 20 for token in words(generator, 40)]
    for _ in range(2):
        clinic.admit(joined([*generator.choice(runs), *words(generator, 1)] for _ in range(1000)), num_cached=0)
    clinic.wait()
    report = clinic.doctor.report(0)
    assert report.num_examined + report.num_skipped == 2
    assert report.lost_tokens == 0


def test_an_examination_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch, clinic: Clinic) -> None:
    monkeypatch.setattr(doctor_module, "MAX_SECONDS_EACH", -1.0)
    generator = random.Random(9)
    clinic.admit(text(generator, 3000))
    clinic.admit(text(generator, 3000))
    clinic.wait()
    report = clinic.doctor.report(0)
    assert (report.num_examined, report.num_skipped) == (1, 1)  # of the first, there was nothing to compare with
    monkeypatch.undo()
    clinic.admit([*clinic.cached[""][1], *words(generator, 20)], num_cached=0)
    clinic.wait()
    assert clinic.doctor.report(0).recent[0].lost_tokens == 3000  # it is remembered all the same


def test_a_decoder_that_fails_costs_one_examination() -> None:
    def refuse(token_ids: Sequence[int]) -> str:
        raise ValueError("no such token")

    doctor = Doctor(refuse, share=1.0)
    try:
        clinic, generator = Clinic(doctor), random.Random(10)
        head, tail = text(generator, 20), text(generator, 80)
        for _ in range(3):
            clinic.admit(dated(generator, head, tail))
        clinic.wait()
        report = doctor.report(0)
        assert (report.num_examined, report.num_skipped) == (1, 2)
    finally:
        doctor.close()


@pytest.mark.parametrize("name", ["add", "answered"])
def test_a_memory_that_fails_begins_anew(clinic: Clinic, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its thread goes on, also after the fault of an answer, which nobody counts."""

    def fail(*_: object) -> None:
        raise RuntimeError("half-way")

    generator = random.Random(12)
    head, tail = text(generator, 20), text(generator, 80)
    clinic.admit(dated(generator, head, tail))
    clinic.wait()
    monkeypatch.setattr(doctor_module.PromptMemory, name, fail)
    clinic.admit(dated(generator, head, tail), answer=words(generator, 9))
    clinic.wait()
    monkeypatch.undo()
    assert len(clinic.doctor._memory) == 0
    for _ in range(3):
        clinic.admit(dated(generator, head, tail))
    clinic.wait()
    report = clinic.doctor.report(0)
    assert report.num_examined + report.num_skipped == 5
    assert report.num_skipped == (name == "add")
    assert report.recent[0].lost_tokens == len(tail) + 1


def test_texts_of_no_characters(clinic: Clinic) -> None:
    """Special tokens are not shown, so prompts of them have no text."""
    prompt = [0] * 5000
    clinic.admit(prompt)
    clinic.admit([*words(random.Random(11), 3), *prompt])
    clinic.wait()
    assert clinic.doctor.report(0).recent[0].lost_tokens == 4999


# --------------------------------------------------------------------------- the thread


@pytest.fixture
def held() -> Iterator[tuple[Doctor, threading.Event]]:
    """A doctor whose thread waits, in the decoder, until the event is set."""
    release, is_held = threading.Event(), threading.Event()

    def wait(token_ids: Sequence[int]) -> str:
        is_held.set()
        assert release.wait(WAIT_SECONDS)
        return decode(token_ids)

    doctor = Doctor(wait, share=1.0, max_waiting=10, max_waiting_tokens=50_000)
    generator = random.Random(12)
    prompt = text(generator, 100)
    doctor.admitted([admission("first", prompt), admission("second", [*prompt[:50], *text(generator, 100)], 50)])
    assert is_held.wait(WAIT_SECONDS)
    yield doctor, release
    release.set()
    doctor.close()


def test_what_comes_while_too_many_wait_is_counted_and_nobody_waits(held: tuple[Doctor, threading.Event]) -> None:
    doctor, release = held
    generator = random.Random(13)
    for number in range(25):
        doctor.admitted([admission(f"r{number}", words(generator, 50))])
    assert doctor.report(0).num_skipped == 15
    doctor.answered("r1", [1, 2, 3])  # no room: forgotten, and no admission
    release.set()
    assert doctor.wait(WAIT_SECONDS)
    report = doctor.report(0)
    assert (report.num_examined, report.num_skipped) == (12, 15)


def test_what_waits_is_bounded_in_tokens_too(held: tuple[Doctor, threading.Event]) -> None:
    doctor, release = held
    generator = random.Random(14)
    doctor.admitted([admission(f"r{number}", words(generator, 20_000)) for number in range(4)])
    assert doctor.report(0).num_skipped == 2
    release.set()
    assert doctor.wait(WAIT_SECONDS)
    doctor.admitted([admission("later", words(generator, 40_000))])
    assert doctor.wait(WAIT_SECONDS)
    assert doctor.report(0).num_skipped == 2


class SlowMotion:
    """A clock that goes on only while somebody waits, in place of the event that says that the doctor closes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_closing = threading.Event()

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return self.is_closing.is_set()

    def set(self) -> None:
        self.is_closing.set()

    def is_set(self) -> bool:
        return self.is_closing.is_set()


@pytest.mark.parametrize("share", [0.001, 0.02, 0.5])
def test_the_thread_waits_for_what_its_processor_time_is_worth(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "BURST_SECONDS", 0.001)
    motion = SlowMotion()
    doctor = Doctor(decode, clock=lambda: motion.now, share=share)
    monkeypatch.setattr(doctor, "_is_closing", motion)
    try:
        clinic, generator = Clinic(doctor), random.Random(15)
        for _ in range(5):
            clinic.admit(words(generator, 5000))
        clinic.wait()
        paid = doctor.report(0).seconds_spent
        doctor.admitted([admission("last", words(generator, 100))])  # what was spent is settled before the next piece
        clinic.wait()
        assert share * motion.now >= paid - 0.001 > 0
    finally:
        doctor.close()


def test_close_ends_the_thread_while_it_waits_for_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "BURST_SECONDS", 0.0)
    doctor = Doctor(decode, share=1e-9)
    generator = random.Random(16)
    doctor.admitted([admission(f"r{number}", words(generator, 10_000)) for number in range(3)])
    doctor.close()
    assert not doctor._thread.is_alive()
    doctor.close()


def test_an_idle_doctor_takes_no_processor_time(clinic: Clinic) -> None:
    clinic.wait()
    assert clinic.doctor.report(0).seconds_spent == 0


def test_every_cause_is_documented() -> None:
    document = (Path(__file__).resolve().parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    for cause in CAUSES:
        assert f"\n| `{cause}` |" in document
