"""The figures of `kvd bench` on given numbers: rates, spreads, the knee, hits and misses, the picture."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any

import pytest

from kvd.tools.bench_answer import Answer, BenchFailed, error_text, read_answer
from kvd.tools.bench_client import Description, is_loopback, parse_root
from kvd.tools.bench_documents import Documents, found_percent, kv_mebibytes, split_by_hit, visits
from kvd.tools.bench_loads import Streams, common_rate, whole_rate
from kvd.tools.bench_machine import cpu_facts
from kvd.tools.bench_picture import draw
from kvd.tools.bench_prompts import Sizer
from kvd.tools.bench_report import Report, Side, number, shown
from kvd.tools.bench_run import LoadResult, Run, Sample, knees, make_loads
from kvd.tools.bench_stats import Spread, knee, most_at_once, paired_ratios, spread
from kvd.tools.svg_shapes import nice_ceiling


def answer(sent: float, arrivals: Sequence[float], **changes: Any) -> Answer:
    """One token per arrival unless told otherwise."""
    values: dict[str, Any] = {
        "sent": sent, "arrivals": tuple(arrivals), "last": arrivals[-1], "prompt_tokens": 100,
        "completion_tokens": len(arrivals), "cached_tokens": None, "max_tokens": len(arrivals),
    }  # fmt: skip
    return Answer(**values | changes)


# --------------------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({1: 10.0, 2: 19.0, 4: 35.0, 8: 60.0, 16: 65.0, 32: 66.0}, 8),
        ({1: 10.0, 2: 20.0, 4: 40.0, 8: 80.0}, 8),
        ({1: 10.0, 2: 20.0, 4: 15.0, 8: 12.0}, 2),  # falls again
        ({1: 90.0, 2: 100.0}, 1),  # exactly the share
        ({1: 89.9, 2: 100.0}, 2),
        ({1: None, 2: 50.0, 4: 51.0}, 2),
        ({4: 10.0}, None),
        ({1: None, 2: 3.0}, None),
        ({}, None),
    ],
)
def test_the_knee_is_the_first_that_reaches_nine_tenths(rates: dict[int, float | None], expected: int | None) -> None:
    assert knee(rates) == expected


def test_spreads_leave_out_what_is_not_known() -> None:
    assert spread([3.0, 1.0, None, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert spread([None, None]) is None


def test_ratios_are_pair_by_pair() -> None:
    assert paired_ratios([2.0, 9.0, None, 1.0], [1.0, 3.0, 1.0, 0.0]) == [2.0, 3.0, None, None]
    with pytest.raises(ValueError, match="argument 2"):
        paired_ratios([1.0], [])


def test_most_at_once() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([(0, 2), (1, 3), (2, 4)]) == 2  # one ends as another begins
    assert most_at_once([(0, 9), (1, 3), (2, 4), (3, 5)]) == 3


# --------------------------------------------------------------------------- rates


def test_the_rate_of_one_stream_leaves_out_the_first_token() -> None:
    assert answer(0, [5.0, 6.0, 7.0]).decode_rate == 1.0
    assert answer(0, [5.0, 7.0], completion_tokens=9).decode_rate == 4.0  # by usage, not by chunks
    assert answer(0, [5.0, 6.0], last=7.0, completion_tokens=3).decode_rate == 1.0
    assert answer(0, [5.0]).decode_rate is None
    assert answer(1, [5.0]).ttft_seconds == 4.0


def test_the_common_interval_begins_with_the_last_first_chunk_and_ends_with_the_first_last_one() -> None:
    early, late = answer(0, [1, 2, 3, 4, 5, 6]), answer(0, [3, 5, 7, 9])
    # From 3 to 6: chunks at 4, 5, 6 of the one and at 5 of the other.
    assert common_rate([early, late]) == pytest.approx(4 / 3)
    doubled = dataclasses.replace(late, completion_tokens=8)
    assert common_rate([early, doubled]) == pytest.approx(5 / 3)
    assert whole_rate([early, late]) == pytest.approx(10 / 9)


def test_streams_that_wait_for_each_other_have_no_common_interval() -> None:
    assert common_rate([answer(0, [1, 2, 3]), answer(0, [4, 5, 6])]) is None


# --------------------------------------------------------------------------- the stream


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


USAGE = {"prompt_tokens": 5, "completion_tokens": 3}
TEXT = event({"choices": [{"text": "a", "finish_reason": None}], "usage": None})
END = event({"choices": [{"text": "", "finish_reason": "length"}]})


def test_an_event_belongs_to_the_piece_that_completes_it() -> None:
    pieces = [(1.0, b": hello\n\n" + TEXT[:7]), (2.0, TEXT[7:]), (3.0, TEXT + TEXT[:-1]), (4.0, b"\n" + END)]
    pieces += [(5.0, event({"choices": [], "usage": USAGE})), (6.0, b"data: [DONE]\r\n\r\n")]
    result = read_answer(0.5, pieces, 3)
    assert result.arrivals == (2.0, 3.0, 3.0)
    assert result.last == 4.0
    assert (result.prompt_tokens, result.completion_tokens, result.cached_tokens) == (5, 3, None)


def test_a_token_without_text_counts_when_the_answer_closes() -> None:
    result = read_answer(0.0, [(2.0, END), (3.0, event({"choices": [], "usage": USAGE}))], 1)
    assert result.arrivals == (2.0,)
    assert result.last == 2.0


@pytest.mark.parametrize(
    ("extra", "cached"),
    [
        ({"usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 4}}}, 4),
        ({"usage": USAGE | {"prompt_tokens_details": None}}, None),
        ({"usage": USAGE, "timings": {"cache_n": 2}}, 2),
    ],
)
def test_where_cached_tokens_are_found(extra: dict[str, Any], cached: int | None) -> None:
    assert read_answer(0.0, [(1.0, TEXT + END), (2.0, event({"choices": []} | extra))], 3).cached_tokens == cached


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (TEXT + END, "no usage"),
        (b"", "without a token"),
        (event({"choices": [], "usage": USAGE}), "without a token"),
        (TEXT + event({"error": {"message": "out of\nblocks"}}), "error in mid-stream: out of blocks"),
        (b"data: {\n\n", "not JSON in the stream"),
    ],
)
def test_streams_that_cannot_be_counted(stream: bytes, message: str) -> None:
    with pytest.raises(BenchFailed, match=message):
        read_answer(0.0, [(1.0, stream)], 3)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": {"message": "no"}}, "no"),
        ({"error": "plain"}, "plain"),
        ({"detail": "fast"}, "fast"),
        ({"object": "error", "message": "old"}, "old"),
        (["odd"], "['odd']"),
    ],
)
def test_errors_of_several_kinds(body: Any, text: str) -> None:
    assert error_text(body) == text


# --------------------------------------------------------------------------- addresses, prompts, loads


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://[::1]:1/v1", "http://[::1]:1"),
        ("http://localhost/api/v1", "http://localhost/api"),
    ],
)
def test_base_urls(url: str, root: str) -> None:
    assert parse_root(url, "--url", allow_remote=False) == root


def test_what_is_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost", "LOCALHOST")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "localhost.example.org", "::", "")))
    assert parse_root("https://example.org/v1", "--url", allow_remote=True) == "https://example.org"


def test_sizes_follow_the_nearest_count_that_was_seen() -> None:
    sizer = Sizer()
    sizer.learn(24, 51)
    assert sizer.words_for(51) == 24
    sizer.learn(500, 400)
    assert sizer.words_for(402) == 502
    assert sizer.words_for(50) == 23
    assert sizer.words_for(1) == 1


def test_loads_scale_with_the_context() -> None:
    by_name = {load.name: load for load in make_loads(["ttft", "documents", "single"], 1000, None)}
    documents = by_name["documents"]
    assert isinstance(documents, Documents)
    assert documents.document_tokens == round(1000 * 15 / 32) - 32
    assert by_name["ttft"].needed_tokens == 500 + 32 + 1
    assert make_loads(["ttft"], None, None)[0].needed_tokens == 2048 + 32 + 1
    single = by_name["single"]
    assert isinstance(single, Streams)
    assert single.num_tokens == 128


# --------------------------------------------------------------------------- documents


def test_visits_and_hits_where_the_endpoint_does_not_say() -> None:
    answers = [answer(0, [5, 6]), answer(1, [6, 7]), answer(5, [6, 7]), answer(2, [9, 10])]
    documents = [0, 0, 0, 1]
    assert visits(answers, documents) == ["first", "overlapping", "again", "first"]
    misses, hits = split_by_hit(answers, documents)
    assert misses == [answers[0], answers[3]]
    assert hits == [answers[2]]
    assert found_percent(answers) is None


def test_hits_are_what_the_endpoint_says_where_it_says() -> None:
    answers = [answer(0, [5, 6], cached_tokens=0), answer(9, [10, 11], cached_tokens=50),
               answer(1, [6, 7], cached_tokens=51)]  # fmt: skip
    misses, hits = split_by_hit(answers, [0, 0, 0])
    assert misses == answers[:2]
    assert hits == answers[2:]
    assert found_percent(answers) == pytest.approx(100 * 101 / 300)


def test_kv_memory_is_counted_in_whole_blocks() -> None:
    answers = [answer(0, [1.0], prompt_tokens=prompt, completion_tokens=1) for prompt in (15, 16, 17)]
    about = Description("kvd", "1", "m", 100, kv_block_bytes=16 * 2**20, kv_bytes_per_token=2**20)
    assert kv_mebibytes(about, answers) == 32
    assert kv_mebibytes(Description("vLLM", "1", "m", 100), answers) is None


# --------------------------------------------------------------------------- what is shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7.0, "7"),
        (0.1234, "0.12"),
        (9.996, "10.0"),
        (12.34, "12.3"),
        (123.4, "123"),
        (25343.7, "25344"),
        (163477.3, "163k"),
        (131072, "131072"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_a_model_that_is_a_path_is_shown_by_its_last_part() -> None:
    line = Side("B", "http://x", Description("llama.cpp", "b1", "/models/some.gguf", 4096)).line
    assert line == "B: llama.cpp b1, some.gguf, context 4096, http://x"
    assert "org/name," in Side("A", "http://x", Description("vLLM", None, "org/name")).line


def test_cells() -> None:
    assert shown(None) == "n/a"
    assert shown(Spread(9.5, 8.8, 9.7, 5)) == "9.50 (8.80–9.70)"
    assert shown(Spread(8.0, 8.0, 8.0, 5)) == "8"
    assert shown(Spread(0.1, 0.1, 12.0, 5), is_ratio=True) == "0.10 (0.10–12.0)"


@pytest.mark.parametrize(
    ("value", "ceiling"), [(0.0, 1.0), (1.0, 1.0), (1.1, 2.0), (27.0, 40.0), (81.0, 100.0), (650.0, 800.0)]
)
def test_axes_end_at_round_numbers(value: float, ceiling: float) -> None:
    assert nice_ceiling(value) == pytest.approx(ceiling)


def test_cpu_facts() -> None:
    text = "processor\t: 0\nmodel name\t: Some CPU @ 2\nflags\t\t: fpu avx2\n\nmodel name\t: other\n"
    assert cpu_facts(text) == ("Some CPU @ 2", frozenset({"fpu", "avx2"}))
    assert cpu_facts("Features\t: fp asimddp\n") == ("", frozenset({"fp", "asimddp"}))
    assert cpu_facts("") == ("", frozenset())


def report(labels: str, rates: dict[str, dict[int, float | None]]) -> Report:
    """A report with a sweep of these rates (label → concurrency → tok/s), and nothing else."""
    results = []
    for level in rates["A"]:
        load = Streams(f"sweep-{level}", "sweep", str(level), level, 4)
        runs = [
            Run(label, 1, Sample({"whole": rates[label][level], "ttft": 5.0}, (answer(0, [1, 2]),)), 1.0, 0.1)
            for label in labels
        ]
        results.append(LoadResult(load, runs))
    sides = [Side(label, f"http://{label}", Description("unknown", None, "<model> & \x01")) for label in labels]
    machine = {"cpu": "a CPU", "usable_cpus": 2, "logical_cpus": 2, "memory_bytes": None, "system": "some system"}
    return Report(["kvd", "bench"], "1", "2020-01-01T00:00:00+00:00", 1.0, 0, 1, machine, sides, results,
                  knees(results, list(labels)), [])  # fmt: skip


@pytest.mark.parametrize("labels", ["A", "AB"])
def test_the_picture_is_well_formed_and_rings_the_knees(labels: str) -> None:
    rates: dict[str, dict[int, float | None]] = {
        "A": {1: 10.0, 2: 20.0, 4: 21.0}, "B": {1: 5.0, 2: None, 4: 30.0}
    }  # fmt: skip
    made = report(labels, rates)
    assert made.knees == {"A": 2, "B": 4} if labels == "AB" else {"A": 2}
    root = ElementTree.fromstring(draw(made))
    space = "{http://www.w3.org/2000/svg}"
    rings = [circle for circle in root.iter(f"{space}circle") if circle.get("fill") == "none"]
    assert len(rings) == len(labels)
    assert len(list(root.iter(f"{space}polyline"))) == len(labels)
    texts = [text.text for text in root.iter(f"{space}text")]
    assert "20 at 2" in texts
    assert any(text and "<model> &" in text for text in texts)
    assert not [element for element in root.iter() if "href" in " ".join(element.attrib)]
    assert draw(made) == draw(report(labels, rates))
