"""`kvd doctor`: the ranked list as text and as JSON, with and without prompts, and when it cannot be had."""

from __future__ import annotations

import io
import json
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from rich.cells import cell_len

from kvd.cli import main
from kvd.config_keys import ApiKey
from kvd.insight import DoctorReport, Finding, MissCause, Reveal
from kvd.observe.doctor_words import ADVICE, finding_words
from kvd.text.text_model import TextModel
from kvd.tools.doctor import MAX_FINDINGS, TEXT_COLUMNS
from tests.server.fake_insight import FINDING
from tests.server.fakes import build_text_model
from tests.server.threaded import fake_server, scripted_server, serve_in_thread

HOSTILE_NAME = "a\x1b[31mclient\u202e" + "é" * 200


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return build_text_model(tmp_path_factory.mktemp("tokenizer"))


def report_of(*findings: Finding, num_examined: int = 42, num_skipped: int = 0, rate: float = 1000.0) -> DoctorReport:
    lost = sum(finding.lost_tokens for finding in findings)
    return DoctorReport(findings, (), num_examined, num_skipped, 71_820, 2_154, lost, rate, 0.5, ())


def a_finding(
    lost: int = 59_200,
    *,
    client: str = "ann",
    name: str = "chatcmpl-5f0c",
    cause: MissCause = "volatile_line",
    rate: float = 1000.0,
) -> Finding:
    words = finding_words(cause, 40, lost, 14, 41)
    return Finding(cause, client, "chat", 40, lost, lost / rate, 14, words, ADVICE[cause], name)


@contextmanager
def serving(report: DoctorReport, reveals: dict[str, Reveal] | None = None) -> Iterator[str]:
    """A server that has one report, and texts of some requests."""

    async def doctor(request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(report), content_type="application/json")

    async def reveal(request: web.Request) -> web.Response:
        found = (reveals or {}).get(request.match_info["name"])
        if found is None:
            return web.json_response({"error": {"message": "no prompt is kept of it"}}, status=404)
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")

    routes = web.get("/kvd/doctor", doctor), web.get("/kvd/reveal/{name}", reveal)
    with serve_in_thread(lambda: scripted_server(*routes)) as url:
        yield url


def printed(capsys: pytest.CaptureFixture[str], url: str, *words: str) -> str:
    assert main(["doctor", url, *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for line in captured.out.splitlines():
        assert line.isprintable()
        assert cell_len(line) <= TEXT_COLUMNS
    return captured.out


def test_the_ranked_list(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(report_of(a_finding(), a_finding(400, cause="evicted"), num_skipped=17)) as url:
        text = printed(capsys, f"{url}/v1")
    assert text == (
        f"{url}: 42 requests examined, 17 skipped for lack of time\n"
        "3% of 71,820 prompt tokens came from the cache\n"
        "59,600 tokens were computed again though they were known: 59.6s of TTFT at 1,000\n"
        "tokens/s\n"
        "\n"
        "1. volatile line, chat, client ann\n"
        "   one line differs from 41 earlier requests at token 14; 59,200 equal tokens\n"
        "   after it were recomputed\n"
        "   would save 59,200 tokens and 59.2s of TTFT, in 40 requests\n"
        "   change: Move the line that changes (date, time, id, counter) behind\n"
        "           everything that stays, best into the last message, or make it change\n"
        "           less often.\n"
        "   example: chatcmpl-5f0c\n"
        "\n"
        "2. evicted, chat, client ann\n"
        "   400 tokens of 40 requests had been evicted\n"
        "   would save 400 tokens and 400ms of TTFT, in 40 requests\n"
        "   change: Give the cache more room (a larger KV cache, swap_space or\n"
        "           disk_cache), or pin what many requests begin with.\n"
        "   example: chatcmpl-5f0c\n"
    )


def test_the_example_in_the_document_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    document = (Path(__file__).resolve().parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    with serving(report_of(a_finding(rate=7494.0), rate=7494.0)) as url:
        text = printed(capsys, url).replace(url, "http://127.0.0.1:8000")
    assert f"$ kvd doctor\n{text}```" in document


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (report_of(), "nothing to report: 42 requests examined; 3% of 71,820 prompt tokens came from\nthe cache\n"),
        (
            report_of(a_finding(9, cause="too_short"), a_finding(0), num_examined=1),
            "nothing to report: 1 request examined; 3% of 71,820 prompt tokens came from the\ncache\n",
        ),
        (DoctorReport((), (), 0, 0, 0, 0, 0, 0.0, 0.0, ()), "nothing to report: 0 requests examined\n"),
    ],
    ids=["no finding", "nothing lost", "idle"],
)
def test_nothing_to_report(report: DoctorReport, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(report) as url:
        assert printed(capsys, url) == line


def test_a_rate_that_is_not_measured_yet_gives_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(report_of(a_finding(), rate=0.0)) as url:
        assert "though they were known\n" in printed(capsys, url)


def test_many_findings_and_names_from_outside(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [a_finding(1000 - number, client=HOSTILE_NAME) for number in range(MAX_FINDINGS + 5)]
    with serving(report_of(*findings)) as url:
        text = printed(capsys, url)
    assert f"\n{MAX_FINDINGS}. volatile line" in text
    assert f"\n{MAX_FINDINGS + 1}. " not in text
    assert "\n5 more findings, of 4,890 lost tokens, are in --json\n" in text
    assert "a·[31mclient·é" in text


def test_json_is_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(a_finding(client=HOSTILE_NAME))
    with serving(report, {"chatcmpl-5f0c": Reveal("t", "ours", "theirs")}) as url:
        assert main(["doctor", url, "--json"]) == 0
        assert msgspec.json.decode(capsys.readouterr().out, type=DoctorReport) == report
        assert main(["doctor", "--json", "--show-prompts", url]) == 0
    examples = json.loads(capsys.readouterr().out)["examples"]
    assert examples == {"chatcmpl-5f0c": {"title": "t", "ours": "ours", "theirs": "theirs"}}


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_terminal_without_utf_8_gets_something_too(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    with serving(report_of(a_finding(client="Zoë"))) as url:
        monkeypatch.setattr("sys.stdout", stdout)
        assert main(["doctor", url, *flags]) == 0
    shown = stdout.buffer.getvalue().decode()
    assert ("Zo\\u00eb" if flags else "client Zo?") in shown


def test_prompts_are_shown_with_the_difference_marked(capsys: pytest.CaptureFixture[str]) -> None:
    generator = random.Random(1)
    around = " ".join(generator.choices(["alpha", "beta", "gamma"], k=60))
    reveal = Reveal("", f"Today is Monday 10:22\n{around}\x07", f"Today is Sunday 10:22\n{around}\x07")
    with serving(report_of(a_finding(), a_finding(5, name="gone")), {"chatcmpl-5f0c": reveal}) as url:
        text = printed(capsys, url, "--show-prompts")
    assert "   its text:    Today is ▸Monday◂ 10:22\n" in text
    assert "   earlier one: Today is ▸Sunday◂ 10:22\n" in text
    assert "alpha" in text
    with serving(report_of(a_finding()), {"chatcmpl-5f0c": reveal}) as url:
        assert "alpha" not in printed(capsys, url)


# --------------------------------------------------------------------------- the real routes, and when it cannot


def refusal(capsys: pytest.CaptureFixture[str], *words: str, code: int = 1) -> str:
    """The one line on stderr."""
    assert main(["doctor", *words]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvd: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_server_that_hides_prompts_says_so(text_model: TextModel, capsys: pytest.CaptureFixture[str]) -> None:
    with serve_in_thread(lambda: fake_server(text_model)) as url:
        assert FINDING.words in printed(capsys, url)
        assert "show_prompts" in refusal(capsys, url, "--show-prompts")
    with serve_in_thread(lambda: fake_server(text_model, show_prompts=True)) as url:
        assert "its text:    Today is ▸Monday◂\n" in printed(capsys, url, "--show-prompts")


def test_the_key_comes_by_flag_or_environment(
    text_model: TextModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVD_API_KEY", raising=False)
    with serve_in_thread(lambda: fake_server(text_model, api_keys=(ApiKey("me", "hush"),))) as url:
        assert "--key, or KVD_API_KEY in the environment" in refusal(capsys, url)
        assert "--key" in refusal(capsys, url, "--key", "wrong")
        printed(capsys, url, "--key", "hush")
        monkeypatch.setenv("KVD_API_KEY", "hush")
        printed(capsys, url)


def test_nothing_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        line = refusal(capsys, f"127.0.0.1:{unused.getsockname()[1]}")
    assert "Connection refused; is kvd running?" in line


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--fast",), "--fast"),
        (("ftp://host",), "URL: expected http://HOST:PORT"),
        (("http://a", "http://b"), "http://b"),
    ],
    ids=str,
)
def test_bad_flags(words: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in refusal(capsys, *words, code=2)


@pytest.mark.parametrize(
    "body", [b"{garbage", b"\x00\xff", b'{"findings": 3}', b"[" * 10_000, b""], ids=lambda body: repr(body[:10])
)
def test_a_server_that_makes_no_sense(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    with serve_in_thread(lambda: scripted_server(web.get("/{path:.*}", answer))) as url:
        line = refusal(capsys, url)
    assert url in line
    assert line.strip().isprintable()


def test_a_server_of_another_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_in_thread(scripted_server) as url:
        assert "is no kvd server, or one of another version: there is no /kvd/doctor" in refusal(capsys, url)
