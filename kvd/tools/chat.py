"""`kvd chat`: talk to an endpoint in the terminal; in a pipe, one question and one answer.

Purpose: the quickest way to try a model. Main thread; an event loop runs only while an answer is streamed, so that
Ctrl-C ends that answer and nothing else. Invariant: what is in the history was shown, and nothing that a model writes
reaches the terminal as a control sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import NoReturn, TextIO

from kvd.config_load import load_config
from kvd.errors import ConfigError, KvdError
from kvd.tools.bench_client import parse_root
from kvd.tools.chat_client import ChatEndpoint, Message

DEFAULT_URL = "http://127.0.0.1:8000/v1"
PROMPT = "> "
HISTORY_LINES = 1000
PASTE_SECONDS = 0.03

COMMANDS_HELP = """\
  /clear          forget the conversation; the system message stays
  /retry          ask the last question again
  /system [TEXT]  set the system message; without TEXT remove it
  /save FILE      write the conversation: JSON where FILE ends in .json, else Markdown
  /help           this list
  /quit           leave, as does Ctrl-D
Ctrl-C stops an answer. A text that begins with / is sent with // in front."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class _Parser(argparse.ArgumentParser):
    """Raises in place of printing usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Chat until the user leaves, or answer what comes through a pipe; the exit code."""
    parser = _Parser(prog="kvd chat", add_help=False, allow_abbrev=False)
    parser.add_argument("--url", default=DEFAULT_URL)
    parser.add_argument("--key")
    parser.add_argument("--model")
    parser.add_argument("--system")
    chosen = parser.parse_args(words)
    url = re.sub(r"(/v1)+/*$", "", chosen.url)
    root = parse_root(url, "--url", allow_remote=True)
    endpoint = ChatEndpoint(root, chosen.model, chosen.key or environment.get("KVD_API_KEY"))
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    conversation = Conversation(endpoint, _Screen(sys.stdout, is_terminal, environment), chosen.system)
    if not is_terminal:
        return _answer_pipe(conversation)
    asyncio.run(endpoint.find_model())
    home = load_config(environment=environment).config.home_path
    with _line_editing(home / "chat_history"):
        print(f"{endpoint.model} at {endpoint.root}; /help lists the commands, Ctrl-D leaves")
        _talk(conversation)
    return 0


def _answer_pipe(conversation: Conversation) -> int:
    question = sys.stdin.read().strip()
    if not question:
        raise ConfigError("nothing came through the pipe; kvd chat reads one question from it")
    asyncio.run(conversation.endpoint.find_model())
    asyncio.run(conversation.ask(question))
    return 0


def _talk(conversation: Conversation) -> None:
    """Read and answer until the end of input or /quit; every failure is a line, and the talk goes on."""
    while True:
        try:
            text = _read_text()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)")
            continue
        try:
            if _is_command(text):
                if not _obey(conversation, text):
                    return
            elif text:
                _ask(conversation, text.removeprefix("/") if text.startswith("//") else text)
        except KeyboardInterrupt:
            print("(stopped)")
        except (KvdError, OSError) as error:
            print(f"kvd: {error}", file=sys.stderr)


def _is_command(text: str) -> bool:
    return text.startswith("/") and not text.startswith("//")


def _ask(conversation: Conversation, question: str) -> None:
    # On Ctrl-C the runner cancels the answer, which closes its connection, and then raises KeyboardInterrupt.
    asyncio.run(conversation.ask(question))


def _obey(conversation: Conversation, text: str) -> bool:
    """Do what a command says; False for the one that leaves."""
    command, _, argument = text.partition(" ")
    argument = argument.strip()
    match command:
        case "/quit" | "/exit":
            return False
        case "/help":
            print(COMMANDS_HELP)
        case "/clear":
            conversation.clear()
            print("(cleared)")
        case "/retry":
            _ask(conversation, conversation.take_back())
        case "/system":
            conversation.system = argument or None
            print("(the system message is set)" if argument else "(there is no system message)")
        case "/save":
            conversation.save(argument)
            print(f"(saved as {argument})")
        case _:
            raise ConfigError(f"there is no command {command[:40]}; /help lists them, and // sends a text with a /")
    return True


# --------------------------------------------------------------------------- the conversation


class Conversation:
    """What was said, and who answers.

    A question is part of the history once something was answered to it, so that a failed one does not stand there
    without an answer; `take_back` has it all the same.
    """

    def __init__(self, endpoint: ChatEndpoint, screen: _Screen, system: str | None = None) -> None:
        self.endpoint = endpoint
        self.system = system
        self.turns: list[Message] = []
        self._screen = screen
        self._last_question: str | None = None
        self._is_answered = False

    @property
    def messages(self) -> list[Message]:
        """The history as it is sent."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    async def ask(self, question: str) -> None:
        """Show the answer while it comes. Whatever was shown stays in the history, also when it is cut off."""
        self._last_question, self._is_answered = question, False
        asked = {"role": "user", "content": question}
        pieces: list[str] = []
        reason = None
        try:
            async with aclosing(self.endpoint.answer([*self.messages, asked])) as deltas:
                async for delta in deltas:
                    reason = delta.finish_reason or reason
                    self._screen.show(delta.text, is_reasoning=delta.is_reasoning)
                    if not delta.is_reasoning:
                        pieces.append(delta.text)
        finally:
            self._screen.end()
            if text := "".join(pieces):
                self.turns += [asked, {"role": "assistant", "content": text}]
                self._is_answered = True
        if reason == "length":
            self._screen.remark("(cut off: the context or the length limit is full)")

    def take_back(self) -> str:
        """The last question, taken out of the history with its answer."""
        if self._last_question is None:
            raise ConfigError("there is no question to ask again")
        if self._is_answered:
            del self.turns[-2:]
            self._is_answered = False
        return self._last_question

    def clear(self) -> None:
        self.turns = []
        self._last_question, self._is_answered = None, False

    def save(self, name: str) -> None:
        """Write the conversation to a new file. Raises ConfigError for a name that is missing or taken."""
        if not name:
            raise ConfigError("/save needs the name of a file")
        path = Path(os.path.expanduser(name))
        if path.suffix == ".json":
            text = json.dumps({"model": self.endpoint.model, "messages": self.messages}, indent=2, ensure_ascii=False)
        else:
            text = "\n\n".join(f"## {message['role']}\n\n{message['content'].strip()}" for message in self.messages)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text + "\n")
        except FileExistsError:
            raise ConfigError(f"{name} exists; choose another name") from None
        except OSError as error:
            raise ConfigError(f"{name}: {error.strerror or error}") from None


class _Screen:
    """Where answers appear: reasoning dimmed on a terminal and left out in a pipe."""

    def __init__(self, stream: TextIO, is_terminal: bool, environment: Mapping[str, str]) -> None:
        self._stream = stream
        self._is_terminal = is_terminal
        self._has_styles = is_terminal and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
        self._is_dim = False
        self._ends_line = True

    def show(self, text: str, *, is_reasoning: bool) -> None:
        if not text or (is_reasoning and not self._is_terminal):
            return
        if is_reasoning != self._is_dim:
            self._switch(is_reasoning)
        if self._is_terminal:
            text = _CONTROL.sub("", text)
        self._write(text)

    def end(self) -> None:
        """Close the answer: plain style, and a line of its own for what follows."""
        if self._is_dim:
            self._switch(False)
        if not self._ends_line:
            self._write("\n")

    def remark(self, text: str) -> None:
        print(text, file=self._stream if self._is_terminal else sys.stderr)

    def _switch(self, to_dim: bool) -> None:
        """Begin or end the reasoning, visibly also where there are no styles."""
        begin, end = (_DIM, _PLAIN) if self._has_styles else ("(thinking) ", "(answer) ")
        if not to_dim and not self._ends_line:
            self._write("\n")
        self._stream.write(begin if to_dim else end)
        self._is_dim = to_dim

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()
            self._ends_line = text.endswith("\n")


# --------------------------------------------------------------------------- the terminal


@contextlib.contextmanager
def _line_editing(history: Path) -> Iterator[None]:
    """Arrow keys, and a history that outlives the program; without readline, plain lines."""
    try:
        import readline
    except ImportError:
        yield
        return
    # A pasted text with several lines is then one text; libedit does not know it, and `_read_text` gathers the lines.
    readline.parse_and_bind("set enable-bracketed-paste on")
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(mode=0o600)
            readline.write_history_file(history)


def _read_text() -> str:
    """What the user typed or pasted, one line or several."""
    lines = [input(PROMPT)]
    if _is_command(lines[0]):
        return lines[0].strip()
    while select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
        try:
            lines.append(input())
        except EOFError:
            break
    return "\n".join(lines).strip()
