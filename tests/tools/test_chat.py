"""`kvd chat` as a process: in a pseudo terminal, in a pipe, and when things go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvd.tools.chat_client import ChatFailed, Delta, _read_chunk
from tests.server.threaded import scripted_server, serve_in_thread

ROOT = Path(__file__).resolve().parent.parent.parent
WAIT_SECONDS = 30.0
CTRL_C, CTRL_D = "\x03", "\x04"
PASTE_BEGIN, PASTE_END = "\x1b[200~", "\x1b[201~"


@dataclass
class Partner:
    """A scripted endpoint: the last word of the question says what happens."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    num_left: int = 0

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "first-model"}, {"id": "second"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        question = body["messages"][-1]["content"]
        match question.split()[-1]:
            case "locked":
                error = {"message": "the API key is wrong", "type": "authentication_error"}
                return web.json_response({"error": error}, status=401)
            case "busy":
                error = {"message": "full; try again in 3s", "type": "server_error"}
                return web.json_response({"error": error}, status=503)
            case "html":
                return web.Response(text="<html>", status=502, reason="Bad Gateway")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._stream(response, question)
        except (asyncio.CancelledError, ConnectionError):
            self.num_left += 1
            raise
        return response

    async def _stream(self, response: web.StreamResponse, question: str) -> None:
        word = question.split()[-1]

        async def send(**delta: str) -> None:
            await response.write(b"data: %s\n\n" % json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode())

        await send(role="assistant", content="")
        if word == "think":
            await send(reasoning_content="Let me ")
            await send(reasoning_content="see.")
        if word == "evil":
            await send(content="\x1b[2J\x07\x9b31mred")
        await send(content=f"You said {question!r}.")
        if word == "slow":
            while True:
                await response.write(b": keep-alive\n\n")
                await asyncio.sleep(0.01)
        if word == "broken":
            return
        if word == "fault":
            await response.write(b'data: {"error": {"message": "step 3 failed"}}\n\ndata: [DONE]\n\n')
            return
        reason = "length" if word == "long" else "stop"
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
        await response.write(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(end).encode())


@pytest.fixture
def partner() -> Iterator[Partner]:
    made = Partner()
    routes = (web.get("/v1/models", made.models), web.post("/v1/chat/completions", made.chat))
    with serve_in_thread(lambda: scripted_server(*routes)) as url:
        made.url = url
        yield made


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("KVD_API_KEY", "NO_COLOR")}
    return kept | {"KVD_HOME": str(home), "TERM": "xterm-256color"} | more


class Terminal:
    """`kvd chat` in a pseudo terminal, and everything that it has written."""

    def __init__(self, partner: Partner, home: Path, *words: str, **more: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvd", "chat", "--url", f"{partner.url}/v1", *words],
            cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, env=environment(home, **more), start_new_session=False,
            preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(slave)
        self._raw = b""
        self._seen = 0
        try:
            self.wait_for("\n> ")
        except BaseException:
            self.close()
            raise

    @property
    def written(self) -> str:
        """Everything so far, without the switching of bracketed paste."""
        return re.sub("\x1b\\[\\?2004[hl]\r?", "", self._raw.decode(errors="replace")).replace("\r\n", "\n")

    def wait_for(self, text: str) -> str:
        """Read until `text` was written after what was waited for before; what came up to its end."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (found := self.written.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, self.written
            assert self._read(), self.written
        begin, self._seen = self._seen, found + len(text)
        return self.written[begin : self._seen]

    def _read(self) -> bool:
        if select.select([self._master], [], [], 1.0)[0]:
            try:
                self._raw += os.read(self._master, 65536)
            except OSError:
                return False
        return True

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def press_until(self, key: str, text: str) -> None:
        """Press a key until `text` is written: readline misses a signal between its prompt and its wait for a key."""
        deadline = time.monotonic() + WAIT_SECONDS
        while text not in self.written[self._seen :]:
            assert time.monotonic() < deadline, self.written
            self.type(key)
            again = time.monotonic() + 2
            while text not in self.written[self._seen :] and time.monotonic() < again:
                self._read()
        self.wait_for(text)

    def ask(self, text: str) -> str:
        """Send a line; what is written until the next prompt."""
        self.type(text + "\r")
        return self.wait_for("\n> ")

    def leave(self) -> int:
        self.type(CTRL_D)
        deadline = time.monotonic() + WAIT_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read()
        return self.process.wait(10)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self._master)


def _own_terminal() -> None:
    """The child leads a session whose terminal is its stdin, so that Ctrl-C in it becomes a SIGINT."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(partner: Partner, tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(partner, tmp_path)
    yield opened
    opened.close()


def test_a_conversation(terminal: Terminal, partner: Partner, tmp_path: Path) -> None:
    assert "first-model" in terminal.written
    assert "You said 'Hello'." in terminal.ask("Hello")
    assert "\x1b[2mLet me see.\n\x1b[0mYou said 'please think'." in terminal.ask("please think")
    assert [message["role"] for message in partner.bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert "Let me" not in json.dumps(partner.bodies), "reasoning is not sent back"
    terminal.ask("/retry")
    assert partner.bodies[2] == partner.bodies[1]
    terminal.ask("/system Be brief.")
    terminal.ask("again")
    assert [message["role"] for message in partner.bodies[3]["messages"]][:2] == ["system", "user"]
    assert "(cleared)" in terminal.ask("/clear")
    assert "no question" in terminal.ask("/retry")
    terminal.ask("//etc is a folder")
    assert partner.bodies[4]["messages"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "/etc is a folder"},
    ]  # fmt: skip
    assert "no command /etc" in terminal.ask("/etc is a folder")
    assert "/retry" in terminal.ask("/help")
    assert terminal.leave() == 0
    assert "Traceback" not in terminal.written
    history = tmp_path / "chat_history"
    assert "please think" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal, partner: Partner) -> None:
    terminal.type("go slow\r")
    terminal.wait_for("You said")
    terminal.type(CTRL_C)
    assert "(stopped)" in terminal.wait_for("\n> ")
    terminal.press_until(CTRL_C, "(Ctrl-D leaves)")
    terminal.type("Hello\r")
    terminal.wait_for("You said 'Hello'")
    terminal.wait_for("\n> ")
    assert partner.num_left == 1
    assert partner.bodies[1]["messages"][1] == {"role": "assistant", "content": "You said 'go slow'."}
    assert terminal.leave() == 0


def test_a_pasted_text_is_one_question(terminal: Terminal, partner: Partner) -> None:
    terminal.type(f"{PASTE_BEGIN}def f():\n    return 1\n{PASTE_END}")
    terminal.ask(" explain")
    terminal.type("without\nbrackets\n")
    terminal.wait_for("You said")
    assert partner.bodies[0]["messages"][-1]["content"].splitlines()[:2] == ["def f():", "    return 1"]
    assert partner.bodies[1]["messages"][-1]["content"] == "without\nbrackets"


def test_failures_are_lines_and_the_talk_goes_on(terminal: Terminal, partner: Partner) -> None:
    for word, part in (
        ("locked", "the API key is wrong (--key, or KVD_API_KEY"),
        ("busy", "HTTP 503: full; try again in 3s"),
        ("html", "HTTP 502: Bad Gateway"),
        ("broken", "the answer broke off"),
        ("fault", "step 3 failed"),
    ):
        assert f"kvd: {part}" in terminal.ask(word)
    assert "red" in (shown := terminal.ask("be evil"))
    assert "\x1b[2J" not in shown
    assert "\x9b" not in shown
    assert "(cut off" in terminal.ask("be long")
    contents = [message["content"] for message in partner.bodies[-1]["messages"]]
    assert "busy" not in contents
    assert "broken" in contents, "what was shown stays"


def test_saving(terminal: Terminal, tmp_path: Path) -> None:
    terminal.ask("Hello")
    for name in ("talk.json", "talk.md"):
        path = tmp_path / name
        assert "(saved" in terminal.ask(f"/save {path}")
        assert "exists" in terminal.ask(f"/save {path}")
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert "## assistant\n\nYou said 'Hello'." in (tmp_path / "talk.md").read_text()
    assert "needs the name" in terminal.ask("/save")
    assert "No such file" in terminal.ask(f"/save {tmp_path}/none/x.md")


def test_without_styles_reasoning_is_named(partner: Partner, tmp_path: Path) -> None:
    terminal = Terminal(partner, tmp_path, "--model", "second", "--key", "k", NO_COLOR="1")
    try:
        assert "(thinking) Let me see.\n(answer) You said" in terminal.ask("think")
        assert partner.bodies[0]["model"] == "second"
        assert partner.keys == ["Bearer k"]
    finally:
        terminal.close()


# --------------------------------------------------------------------------- pipes


def pipe(home: Path, text: str, *words: str, **more: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvd", "chat", *words],
        cwd=ROOT, input=text, capture_output=True, text=True, check=False, env=environment(home, **more),
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_pipe_is_one_question_and_one_answer(partner: Partner, tmp_path: Path) -> None:
    words = ("--url", f"{partner.url}/v1/v1/", "--system", "Be brief.")
    code, answer, errors = pipe(tmp_path, "two\nlines think\n", *words, KVD_API_KEY="secret")
    assert (code, answer, errors) == (0, "You said 'two\\nlines think'.\n", "")
    assert partner.keys == ["Bearer secret"]
    assert [message["role"] for message in partner.bodies[0]["messages"]] == ["system", "user"]


@pytest.mark.parametrize(
    ("text", "words", "code", "part"),
    [
        ("be locked", (), 1, "the API key is wrong (--key"),
        ("be broken", (), 1, "the answer broke off"),
        (" \n", (), 2, "nothing came through the pipe"),
        ("x", ("--color",), 2, "--color"),
        ("x", ("--url", "ftp://x"), 2, "--url"),
        ("x", ("--url", "http://127.0.0.1:1"), 1, "is kvd running?"),
    ],
)
def test_a_failure_in_a_pipe_is_one_line_and_a_code(
    partner: Partner, tmp_path: Path, text: str, words: tuple[str, ...], code: int, part: str
) -> None:
    found, _, errors = pipe(tmp_path, text, *(words if "--url" in words else ("--url", partner.url, *words)))
    assert found == code
    assert part in errors
    assert len(errors.splitlines()) == 1
    assert re.match(r"kvd: ", errors)


@pytest.mark.parametrize("data", [b"x", b"[]", b"{}", b'{"choices": 1}', b'{"choices": [1]}', b'{"error": 1}'])
def test_a_stream_of_something_else_is_a_failure(data: bytes) -> None:
    with pytest.raises(ChatFailed):
        _read_chunk(data)


def test_a_chunk_without_a_choice_says_nothing() -> None:
    assert _read_chunk(b'{"choices": [], "usage": {}}') == []
    assert _read_chunk(b'{"choices": [{"delta": {"reasoning": "r"}}]}') == [Delta("r", is_reasoning=True)]
