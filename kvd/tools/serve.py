"""`kvd serve`: wires model, engine, text, server and dashboard together, and ends them in order.

    listen ─► load on the main thread, while a waiting room answers 503 ─► event loop: engine, HTTP, dashboard
    first SIGINT, SIGTERM, SIGHUP: refuse new requests, let running ones finish ─► second: end them ─► third: leave

Purpose: the one place where rooms are injected into each other. Main thread; the event loop runs on it once
loading is over. Invariant: while the dashboard shows, nothing else writes to the terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal, NoReturn, TypedDict, Unpack, cast

from aiohttp import web

from kvd.config import Config
from kvd.config_check import is_inline_template
from kvd.config_load import LoadedConfig
from kvd.core import KVEviction
from kvd.errors import CheckpointError, ConfigError, StartupError, UnsupportedModel
from kvd.insight import Admission
from kvd.log import EventSink, Logging, get_logger, setup
from kvd.model.files import ModelFiles
from kvd.model.loading import read_spec, resolve_model
from kvd.model.progress import TerminalProgress
from kvd.model.spec import ModelSpec
from kvd.observe.event_log import EventLog
from kvd.tools.banner import budget_lines, client_lines
from kvd.tools.listen import base_url, close_all, open_sockets
from kvd.tools.waiting_room import WaitingRoom
from kvd.views import EngineInfo

# What takes seconds to import (torch above all) is imported where it is needed, so that a port in use or a model
# that does not exist is said at once.
if TYPE_CHECKING:
    from kvd.engine.engine import Engine
    from kvd.observe.host_facts import HostWatch
    from kvd.server.settings import ServerSettings
    from kvd.text.text_model import TextModel

SWITCH_INTERVAL_SECONDS = 0.0002
"""How long a thread that comes back from C may wait for the interpreter; a decode step is shorter than the
default of 5 ms."""

Level = Literal["debug", "info", "warning", "error"]

_KEY_SOURCES = ("api_key", "api_key_file")

log = get_logger("serve")


def run(loaded: LoadedConfig) -> int:
    """Serve until told to stop; returns the exit code. Raises KvdError where it cannot start."""
    config = loaded.config
    shows_dashboard = wants_dashboard(config)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    events = EventLog()
    logging = setup(config.log_level, to_terminal=True, sink=_sink(events), debug=bool(os.environ.get("KVD_DEBUG")))
    for notice in loaded.notices:
        log.warning(notice)
    sockets = open_sockets(config.host, config.port)
    with contextlib.ExitStack() as ending:
        ending.callback(close_all, sockets)
        with _sigterm_interrupts(), contextlib.closing(WaitingRoom(sockets)):
            model = open_model(config)
            from kvd.observe.doctor import Doctor
            from kvd.server.app import build_app

            doctor = ending.enter_context(contextlib.closing(Doctor(model.text.decode)))
            engine = build(config, model, on_admission=doctor.admitted, on_event=_recorder(events))
            settings = server_settings(config, engine.info, model.files)
            host = watch_host().latest
            app = build_app(engine, model.text, config=settings, event_log=events, doctor=doctor, host=host)
            service = _Service(
                config,
                engine,
                app,
                sockets,
                logging,
                key_origin=" and ".join(loaded.origins[name] for name in _KEY_SOURCES if name in loaded.origins),
                shows_dashboard=shows_dashboard,
            )
        for line in budget_lines(engine.info):
            print(line, file=sys.stderr)
        # What was loaded stays: to look through it in every full collection would hold up the event loop for 10 ms.
        gc.collect()
        gc.freeze()
        return asyncio.run(service.run())


def wants_dashboard(config: Config) -> bool:
    """Whether to show the dashboard; ConfigError where it is asked for and there is no terminal."""
    # Textual draws on stderr: with that in a file the screen would end up in there.
    is_terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    has_terminal = is_terminal and os.environ.get("TERM") != "dumb"
    if config.dashboard and not has_terminal:
        raise ConfigError("--dashboard: there is no terminal to show it in; leave it away to log to stderr")
    return has_terminal if config.dashboard is None else config.dashboard


# --------------------------------------------------------------------------- loading


class Observers(TypedDict, total=False):
    """Who hears of what the engine does; see `kvd.engine.engine.Engine`."""

    on_admission: Callable[[Sequence[Admission]], None]
    on_event: Callable[[Level, str, str, str | None], None]


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint that was found, its shape, and its tokenizer and template."""

    files: ModelFiles
    spec: ModelSpec
    text: TextModel


def load(config: Config) -> tuple[Engine, TextModel, ServerSettings]:
    """Find, read and pack the model, for an engine that nobody watches. Raises StartupError and its children."""
    model = open_model(config)
    engine = build(config, model)
    return engine, model.text, server_settings(config, engine.info, model.files)


def open_model(config: Config) -> Model:
    """Find the model, and read all of it but the weights. Raises StartupError and its children."""
    files = resolve_model(config.model, home=config.home_path, revision=config.revision, progress=TerminalProgress())
    spec = read_spec(files)
    _check_quantization(config, spec)
    text = open_text(config, files)
    log.info(text.describe_parsers())
    return Model(files, spec, text)


def build(config: Config, model: Model, **observers: Unpack[Observers]) -> Engine:
    """Read and pack the weights, and wire the engine. Raises StartupError and its children."""
    from kvd.engine.build import build_engine
    from kvd.observe.nvml import DeviceWatch

    engine_log = get_logger("engine")
    levels = {"debug": 10, "info": 20, "warning": 30, "error": 40}
    try:
        engine = build_engine(
            config,
            model.files,
            model.spec,
            home=config.home_path,
            progress=TerminalProgress(),
            log=lambda level, message: engine_log.log(levels[level], "%s", message),
            watch=lambda device_id: DeviceWatch(device_id).latest,
            **observers,
        )
    except FloatingPointError as error:
        raise CheckpointError(f"{config.model}: the weights drive a first step beyond float32: {error}") from error
    return engine


def watch_host() -> HostWatch:
    """Facts about this machine, with the memory that the engine's budget counts as free."""
    from kvd.engine.host_memory import available_bytes, resident_bytes
    from kvd.observe.host_facts import HostReader, HostWatch

    return HostWatch(lambda: HostReader(available_bytes=available_bytes, resident_bytes=resident_bytes))


def open_text(config: Config, files: ModelFiles) -> TextModel:
    """The model's tokenizer and chat template, with the parsers that the configuration asks for."""
    from kvd.text.text_model import TextModel

    return TextModel(
        files.tokenizer_json,
        chat_template=_chat_template(config, files),
        adds_bos=files.adds_bos,
        bos_token_id=files.bos_token_id,
        special_tokens=files.special_tokens,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )


def server_settings(config: Config, info: EngineInfo, files: ModelFiles) -> ServerSettings:
    """What the server is told; sampling defaults are the checkpoint's."""
    from kvd.server.settings import SamplingDefaults, ServerSettings

    known = {
        name: files.default_sampling[name] for name in SamplingDefaults.__slots__ if name in files.default_sampling
    }
    if files.default_sampling.get("do_sample") is False:
        known["temperature"] = 0.0
    return ServerSettings(
        served_names=info.served_names,
        end_token_ids=frozenset(token_id for token_id in files.eos_token_ids if token_id < info.vocab_size),
        default_sampling=SamplingDefaults(**known),
        kv_eviction=cast(KVEviction, config.kv_eviction),
        host=config.host,
        api_keys=config.api_key,
        api_key_file=None if config.api_key_file is None else Path(config.api_key_file),
        allowed_hosts=config.allowed_hosts,
        allowed_origins=config.allowed_origins,
        max_body_bytes=config.max_body_size,
        max_body_bytes_in_flight=config.max_body_bytes_in_flight,
        max_waiting=config.max_waiting,
        show_prompts=config.show_prompts,
    )


def _chat_template(config: Config, files: ModelFiles) -> str | None:
    chosen = config.chat_template
    if chosen is None:
        return files.chat_template
    if is_inline_template(chosen):
        return chosen
    try:
        with open(chosen, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise StartupError(f"chat_template: {chosen}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise StartupError(f"chat_template: {chosen}: not UTF-8 text") from None


def _check_quantization(config: Config, spec: ModelSpec) -> None:
    found = spec.quantization.split()[0]
    has = found if found in ("awq", "gguf") else "none"
    if config.quantization not in ("auto", has):
        raise UnsupportedModel(
            f"quantization: {config.quantization} is asked for, but {config.model} is {spec.quantization}"
        )


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """While loading, SIGTERM unwinds like Ctrl-C, so that temporary files go."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _sink(events: EventLog) -> EventSink:
    def add(level: str, kind: str, message: str) -> None:
        events.add(cast(Level, level), kind, message)

    return add


def _recorder(events: EventLog) -> Callable[[Level, str, str, str | None], None]:
    def add(level: Level, kind: str, message: str, request_id: str | None) -> None:
        events.add(level, kind, message, request_id)

    return add


# --------------------------------------------------------------------------- serving


class _Service:
    """The running server: engine, HTTP, dashboard, and the order in which they end. Event loop only."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        app: web.Application,
        sockets: list[socket.socket],
        logging: Logging,
        *,
        key_origin: str,
        shows_dashboard: bool,
    ) -> None:
        from kvd.server.lifecycle import RunningServer, create_runner
        from kvd.server.state import STATE

        self._config = config
        self._engine = engine
        self._console = app[STATE].console
        self._sockets = sockets
        port = sockets[0].getsockname()[1]
        self._url = base_url(config.host, port)
        self._runner = create_runner(app)
        self._server = RunningServer(app, self._runner, config.host, port)
        self._logging = logging
        self._key_origin = key_origin
        self._shows_dashboard = shows_dashboard
        self._num_signals = 0

    async def run(self) -> int:
        """Serve; returns the exit code once everything has ended."""
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: serve on
            terminals = [number for number in (1, 2) if os.isatty(number)]
            loop.add_signal_handler(signal.SIGHUP, self._on_hang_up, terminals)
        await self._engine.start()
        await self._runner.setup()
        try:
            for listening in self._sockets:
                await web.SockSite(self._runner, listening).start()
            self._announce()
            if self._shows_dashboard:
                await self._run_dashboard()
            await self._stopping.wait()
            self._server.begin_drain()
            await self._drain()
        finally:
            await self._server.close()
        return 0

    def _announce(self) -> None:
        needs_key = bool(self._config.api_key or self._config.api_key_file)
        for line in client_lines(self._url, self._engine.info, needs_key=needs_key, key_origin=self._key_origin):
            print(line, file=sys.stderr)

    def _on_hang_up(self, terminals: list[int]) -> None:
        """The terminal is gone: what is still written to it goes nowhere, in place of failing."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in terminals:
            os.dup2(nowhere, number)
        os.close(nowhere)
        self._on_signal()

    def _on_signal(self) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._stopping.set()
        elif self._num_signals == 2:
            self._forced.set()
        else:
            os._exit(130)

    async def _drain(self) -> None:
        """Let running requests finish for at most `drain_timeout`, or until a second signal."""
        seconds = self._config.drain_timeout
        log.info(f"stopping: running requests get up to {seconds:g} s to finish; a second signal ends them")
        draining = asyncio.create_task(self._engine.stop(seconds))
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait({draining, forced}, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if not draining.done():
            log.warning("ending requests that have not finished")
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
            await self._engine.stop(0)
        else:
            await draining

    async def _run_dashboard(self) -> None:
        """Show the dashboard until it is closed or the server is told to stop; afterwards the log shows."""
        from kvd.tui.app import Dashboard

        dashboard = Dashboard(
            self._console,
            address=self._url,
            model=self._engine.info.served_names[0],
            on_quit="ask",
        )
        self._logging.show(False)
        showing = asyncio.create_task(dashboard.run_async())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({showing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not showing.done():
                dashboard.exit("stop")
            outcome = await showing
        finally:
            stopping.cancel()
            self._logging.show(True)
        if outcome == "stop":
            self._stopping.set()
        else:
            log.info(f"the dashboard is closed; kvd serves on at {self._url}; Ctrl-C stops it")
