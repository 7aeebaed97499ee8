"""Logging: one line per record, a silent terminal, a sink, crash reports."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.log import get_logger, setup, write_crash_log


@pytest.fixture(autouse=True)
def clean_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, raises = list(root.handlers), root.level, logging.raiseExceptions
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.raiseExceptions = raises
    logging.getLogger("kvd").setLevel(logging.NOTSET)


def test_a_record_is_one_line() -> None:
    stream = io.StringIO()
    setup("info", to_terminal=True, stream=stream)
    get_logger("engine").info("one\ntwo %s", 3)
    get_logger("engine").debug("not heard")
    logging.getLogger("some.library").info("not heard")
    logging.getLogger("some.library").warning("heard")
    lines = stream.getvalue().splitlines()
    assert [line[9:] for line in lines] == ["info engine: one two 3", "warning some.library: heard"]


def test_the_level_is_that_of_the_settings() -> None:
    stream = io.StringIO()
    setup("error", to_terminal=True, stream=stream)
    get_logger("serve").warning("not heard")
    get_logger("serve").error("heard")
    assert stream.getvalue()[9:] == "error serve: heard\n"


def test_a_dashboard_keeps_the_terminal_to_itself() -> None:
    stream = io.StringIO()
    seen: list[tuple[str, str, str]] = []
    installed = setup("info", to_terminal=True, stream=stream, sink=lambda *event: seen.append(event))
    installed.show(False)
    get_logger("engine").info("hidden")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("hidden too", UserWarning, stacklevel=1)
    assert stream.getvalue() == ""
    installed.show(True)
    installed.show(True)
    get_logger("engine").warning("shown")
    assert stream.getvalue().count("\n") == 1
    assert seen[0] == ("info", "engine", "hidden")
    assert seen[1][:2] == ("warning", "py.warnings")
    assert seen[2] == ("warning", "engine", "shown")


def test_setting_up_again_replaces() -> None:
    first, second = io.StringIO(), io.StringIO()
    setup("info", to_terminal=True, stream=first)
    setup("info", to_terminal=True, stream=second)
    get_logger("engine").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_an_error_is_named_and_its_traceback_only_shown_for_debugging() -> None:
    for debug in (False, True):
        stream = io.StringIO()
        setup("info", to_terminal=True, stream=stream, debug=debug)
        try:
            raise ZeroDivisionError("oh\nno")
        except ZeroDivisionError:
            get_logger("server").exception("request failed")
        text = stream.getvalue()
        assert "error server: request failed (ZeroDivisionError: oh no)" in text
        assert ("Traceback" in text) is debug


def test_a_terminal_that_went_away_disturbs_nobody() -> None:
    stream = io.StringIO()
    setup("info", to_terminal=True, stream=stream)
    stream.close()
    get_logger("engine").info("into the void")


def test_crash_reports(tmp_path: Path) -> None:
    path = write_crash_log(tmp_path / "home", ValueError("bad"), "1.2.3")
    assert path is not None
    assert path.parent == tmp_path / "home" / "crashes"
    assert "kvd 1.2.3" in path.read_text()
    assert "ValueError: bad" in path.read_text()
    (tmp_path / "file").write_text("")
    assert write_crash_log(tmp_path / "file", ValueError("bad"), "1.2.3") is None
