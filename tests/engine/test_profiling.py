"""How much memory there is, and the step that the profiling pass runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.core import StepPlan
from kvd.engine import host_memory, profiling
from kvd.engine.profiling import largest_step


@pytest.mark.parametrize(
    ("limits", "num_tokens", "num_seqs"),
    [
        ({"max_tokens": 256, "max_seqs": 16, "max_model_len": 2048, "num_blocks": 1000}, 256, 16),
        ({"max_tokens": 256, "max_seqs": 16, "max_model_len": 40, "num_blocks": 1000}, 256, 16),
        ({"max_tokens": 256, "max_seqs": 2, "max_model_len": 40, "num_blocks": 1000}, 80, 2),
        ({"max_tokens": 256, "max_seqs": 16, "max_model_len": 2048, "num_blocks": 4}, 64, 4),
        ({"max_tokens": 256, "max_seqs": 16, "max_model_len": 2048, "num_blocks": 1}, 16, 1),
        ({"max_tokens": 1, "max_seqs": 1, "max_model_len": 2, "num_blocks": 8}, 1, 1),
        ({"max_tokens": 16, "max_seqs": 16, "max_model_len": 2, "num_blocks": 32}, 16, 16),
    ],
)
def test_the_largest_step_fills_every_limit_and_breaks_none(
    limits: dict[str, int], num_tokens: int, num_seqs: int
) -> None:
    plan = largest_step(**limits, num_groups=2)
    assert (plan.num_tokens, len(plan.items)) == (num_tokens, num_seqs)
    assert all(item.samples and item.num_tokens <= limits["max_model_len"] for item in plan.items)
    used = [block for item in plan.items for block in item.block_tables[0]]
    assert len(set(used)) == len(used) <= limits["num_blocks"]
    assert max(used) < limits["num_blocks"]
    assert all(len(item.block_tables) == 2 for item in plan.items)


def test_a_deep_step_stands_at_the_end_of_the_context_over_a_small_pool() -> None:
    plan = largest_step(max_tokens=64, max_seqs=4, max_model_len=4096, num_blocks=8, num_groups=2, is_deep=True)
    assert (plan.num_tokens, len(plan.items)) == (64, 4)
    for item in plan.items:
        assert item.start + item.num_tokens == 4095
        assert len(item.block_tables[0]) == len(item.first_positions[0]) == 256
        assert set(item.block_tables[1]) == set(range(8))


def test_no_deep_step_begins_before_its_context() -> None:
    """A step may hold the whole context of a sequence."""
    plan = largest_step(max_tokens=64, max_seqs=4, max_model_len=32, num_blocks=8, num_groups=1, is_deep=True)
    assert [(item.start, item.num_tokens) for item in plan.items[:2]] == [(0, 32), (1, 30)]
    assert all(item.start + item.num_tokens in (31, 32) for item in plan.items)


class Bars:
    """A Progress that remembers (label, total, units advanced) of every task."""

    def __init__(self) -> None:
        self.shown: list[list[Any]] = []

    @contextmanager
    def task(self, label: str, total: int | None, unit: str) -> Iterator[Any]:
        bar = [label, total, 0]
        self.shown.append(bar)

        def advance(amount: int) -> None:
            bar[2] += amount

        yield SimpleNamespace(advance=advance)


@pytest.mark.parametrize(
    ("reports", "shown"),
    [([(1, 1)], []), ([(0, 3), (1, 3), (2, 3), (3, 3)], [["Compiling", 3, 3]])],
)
def test_preparation_has_a_bar_where_it_does_something(reports: list[tuple[int, int]], shown: list[list[Any]]) -> None:
    def prepare(report: Callable[[int, int], None]) -> None:
        for done, total in reports:
            report(done, total)

    bars = Bars()
    profiling.prepare(SimpleNamespace(prepare=prepare), "Compiling", bars)  # type: ignore[arg-type]
    assert bars.shown == shown


def test_a_measurement_is_remembered_where_that_is_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that cannot be written to (a read-only mount, a full disk) costs a measurement per start and no more."""
    num_measured = 0

    def measure(runner: object, plan: StepPlan) -> int:
        nonlocal num_measured
        num_measured += 1
        return 4711

    monkeypatch.setattr(profiling, "measure_scratch_bytes", measure)
    plan = StepPlan(0, ())
    (tmp_path / "file").touch()

    def ask(folder: Path, key: str) -> int:
        return profiling.cached_scratch_bytes(None, plan, key=key, folder=folder)  # type: ignore[arg-type]

    assert [ask(tmp_path / "new", "a"), ask(tmp_path / "new", "a"), num_measured] == [4711, 4711, 1]
    assert [ask(tmp_path / "new", "b"), num_measured] == [4711, 2]
    for record in (tmp_path / "new").iterdir():
        record.write_text("{damaged")
    assert [ask(tmp_path / "new", "a"), num_measured] == [4711, 3]
    assert [ask(tmp_path / "file" / "folder", "a"), num_measured] == [4711, 4]


def test_file_pages_in_a_control_group_count_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives them up before it refuses memory; reading a large model fills a container with them."""
    monkeypatch.setattr(host_memory, "_CGROUP_V2", tmp_path / "v2")
    monkeypatch.setattr(host_memory, "_CGROUP_V1", tmp_path / "v1")
    for folder, files in {
        "v2": {"memory.max": "1000000", "memory.current": "900000", "memory.stat": "anon 5\ninactive_file 600000\n"},
        "v1": {
            "memory.limit_in_bytes": "9000000",
            "memory.usage_in_bytes": "8900000",
            "memory.stat": "inactive_file 1\ntotal_inactive_file 850000\n",
        },
    }.items():
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
    assert host_memory.available_bytes() == 700_000
    (tmp_path / "v2" / "memory.max").write_text("max")
    assert host_memory.available_bytes() == 950_000
    (tmp_path / "v1" / "memory.stat").unlink()
    assert host_memory.available_bytes() == 100_000
