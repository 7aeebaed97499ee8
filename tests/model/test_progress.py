"""What progress prints, on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest

from kvd.model.progress import QuietProgress, TerminalProgress, format_amount


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_at_quarters_only() -> None:
    stream = io.StringIO()
    with TerminalProgress(stream).task("Copying", 1000, "B") as task:
        for _ in range(1000):
            task.advance(1)
    percents = [line.split(": ")[1].split("%")[0] for line in stream.getvalue().splitlines()]
    assert percents == ["0", "25", "50", "75", "100"]


def test_a_bar_on_a_terminal_redraws_one_line() -> None:
    stream = FakeTerminal()
    with TerminalProgress(stream).task("Copying", 2_000_000, "B") as task:
        task.advance(1_000_000)
        task.advance(1_000_000)
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert "Copying [########################] 100% 2.0 MB of 2.0 MB" in text


def test_an_unknown_total_and_a_failure() -> None:
    stream = io.StringIO()

    def fail_halfway() -> None:
        with TerminalProgress(stream).task("Reading", None, "files") as task:
            task.advance(3)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail_halfway()
    assert stream.getvalue().splitlines()[-1] == "Reading: 3 files"


def test_going_back_does_not_leave_the_bar() -> None:
    stream = FakeTerminal()
    with TerminalProgress(stream).task("Copying", 10, "B") as task:
        task.advance(10)
        task.advance(-15)
    assert "  0% -5 B" in stream.getvalue()


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with QuietProgress().task("Copying", 10, "B") as task:
        task.advance(10)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("amount", "unit", "text"),
    [
        (0, "B", "0 B"),
        (999, "B", "999 B"),
        (1500, "B", "1.5 KB"),
        (5.6e9, "B", "5.60 GB"),
        (1200, "layers", "1,200 layers"),
    ],
)
def test_amounts(amount: float, unit: str, text: str) -> None:
    assert format_amount(amount, unit) == text
