"""The command line: which command, with what configuration, and how it ends.

Purpose: parse, hand over to the module of the command, and turn every way to end into an exit code and at most
one line: 0 fine, 1 cannot run here, 2 a bad flag, key or value, 130 and 143 ended by a signal. Runs on the main
thread. Invariant: no traceback reaches a user unless KVD_DEBUG is set; nothing heavy is imported before the
command is known.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn, cast

from kvd import __version__
from kvd.cli_usage import USAGE, USAGES
from kvd.config_docs import resolved_yaml, settings_help
from kvd.config_flags import parse_flags
from kvd.config_load import LoadedConfig, load_config
from kvd.errors import ConfigError, KvdError
from kvd.log import write_crash_log
from kvd.openmp import bound_spinning

MACHINE_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO)
"""Failures of a named file that are the machine's or the user's, and no fault of ours."""

HELP_FLAGS = ("-h", "--help")


class _Parser(argparse.ArgumentParser):
    """A parser for the small commands that raises in place of printing usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    bound_spinning()
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output went away; a second failure while Python flushes at exit would print.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KvdError as error:
        return _fail(str(error), error.exit_code)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _fail(f"the disk is full{f': {error.filename}' if error.filename else ''}", 1)
        if error.errno in MACHINE_ERRORS and error.filename:
            return _fail(f"{error.filename}: {error.strerror}{_hint(error.filename)}", 1)
        return _crash(error)
    except MemoryError:
        return _fail("out of memory", 1)
    except Exception as error:
        return _crash(error)
    return code


def _dispatch(words: list[str]) -> int:
    command, rest = (words[0], words[1:]) if words and words[0] in COMMANDS else ("serve", words)
    if command == "serve" and rest[:1] in (["--version"], ["-V"]):
        command, rest = "version", []
    if any(word in HELP_FLAGS for word in rest):
        names_no_command = words and words[0] in HELP_FLAGS
        sys.stdout.write(USAGE if names_no_command else help_of(command, shutil.get_terminal_size().columns))
        return 0
    return COMMANDS[command](rest)


def help_of(command: str, width: int) -> str:
    """What `kvd COMMAND --help` prints on a terminal of `width` columns."""
    return USAGES[command] + (settings_help(width) if command == "serve" else "")


def all_help(width: int = 100) -> dict[str, str]:
    """Every help text under its title, for the documents."""
    return {"kvd": USAGE} | {f"kvd {command}": help_of(command, width) for command in COMMANDS}


# --------------------------------------------------------------------------- commands


def _serve(words: list[str]) -> int:
    loaded = _load(words)[0]
    from kvd.tools import serve

    return serve.run(loaded)


def _check(words: list[str]) -> int:
    loaded, switches = _load(words, ("--json",))
    if "--json" in switches:
        settings = asdict(loaded.config)
        settings["api_key"] = len(loaded.config.api_key)
        result = {"settings": settings, "origins": dict(loaded.origins), "notices": loaded.notices}
        print(json.dumps(result, indent=2, ensure_ascii=False))
        return 0
    sys.stdout.write(resolved_yaml(loaded.config, loaded.origins))
    for notice in loaded.notices:
        print(f"notice: {notice}", file=sys.stderr)
    return 0


def _models(words: list[str]) -> int:
    parser = _Parser(prog="kvd models", add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args(words).json
    home = load_config(environment=os.environ).config.home_path
    from kvd.tools import models

    return models.run(home, as_json=as_json)


def _convert(words: list[str]) -> int:
    parser = _Parser(prog="kvd convert", add_help=False, allow_abbrev=False)
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("target", metavar="DST")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--no-scaling", action="store_true")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(words)
    home = load_config(environment=os.environ).config.home_path
    from kvd.model.progress import TerminalProgress
    from kvd.tools import convert

    report = convert.run(
        chosen.source,
        Path(chosen.target),
        bits=chosen.bits,
        group_size=chosen.group_size,
        scaling=not chosen.no_scaling,
        home=home,
        progress=TerminalProgress(),
    )
    print(json.dumps(report.as_dict(), indent=2) if chosen.json else "\n".join(report.lines()))
    return 0


def _eval(words: list[str]) -> int:
    parser = _Parser(prog="kvd eval", add_help=False, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--text")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(words)
    home = load_config(environment=os.environ).config.home_path
    from kvd.model.progress import TerminalProgress
    from kvd.tools import eval as evaluation

    report = evaluation.run(
        chosen.model,
        kv_cache_dtype=chosen.kv_cache_dtype,
        text=None if chosen.text is None else Path(chosen.text),
        num_tokens=chosen.tokens,
        home=home,
        progress=TerminalProgress(),
    )
    print(json.dumps(report.as_dict(), indent=2) if chosen.json else "\n".join(report.lines()))
    return 0


def _tool(name: str) -> Callable[[list[str]], int]:
    """A command that `kvd.tools` has a module for, which reads the command line itself."""

    def run(words: list[str]) -> int:
        return cast(int, importlib.import_module(f"kvd.tools.{name}").run(words, os.environ))

    return run


def _version(words: list[str]) -> int:
    _Parser(prog="kvd version", add_help=False).parse_args(words)
    print(f"kvd {__version__}")
    return 0


COMMANDS: Mapping[str, Callable[[list[str]], int]] = {
    "serve": _serve,
    "chat": _tool("chat"),
    "top": _tool("top"),
    "doctor": _tool("doctor"),
    "plan": _tool("plan"),
    "check": _check,
    "models": _models,
    "convert": _convert,
    "eval": _eval,
    "bench": _tool("bench"),
    "profile": _tool("profile"),
    "version": _version,
}


def _load(words: list[str], switches: Sequence[str] = ()) -> tuple[LoadedConfig, frozenset[str]]:
    line = parse_flags(words, switches=switches)
    for entry in line.entries:
        if entry.origin == "model argument" and entry.value in COMMANDS:
            raise ConfigError(f"the command comes first: kvd {entry.value} …")
    return load_config(line.config_path, line.entries, os.environ), line.switches


# --------------------------------------------------------------------------- how it ends


def _fail(message: str, code: int) -> int:
    """One line on stderr."""
    if os.environ.get("KVD_DEBUG"):
        traceback.print_exc()
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in message).split())
    print(f"kvd: {line}", file=sys.stderr)
    return code


def _hint(path: str | bytes) -> str:
    """What to change where `path` lies in our own folder."""
    with contextlib.suppress(KvdError):
        home = load_config(environment=os.environ).config.home_path
        if Path(os.fsdecode(path)).is_relative_to(home):
            return "; home (KVD_HOME) must be a directory that can be written"
    return ""


def _crash(error: Exception) -> int:
    """A fault of ours: one line, and a report that says the rest."""
    try:
        home = load_config(environment=os.environ).config.home_path
    except KvdError:
        home = load_config().config.home_path
    path = write_crash_log(home, error, __version__)
    place = f"; the report is in {path}" if path else "; set KVD_DEBUG=1 to see where"
    return _fail(f"internal error: {type(error).__name__}: {error}{place}", 1)
