"""The aiohttp application: routes, and what its handlers share.

Event loop only. Every route answers with and without `/v1`.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from kvd.device_facts import HostFacts
from kvd.errors import RequestError
from kvd.observe.event_log import EventLog
from kvd.observe.local_console import Examiner, LocalConsole
from kvd.server import cache_control, control, insight_routes, messages_api, operations, responses_api
from kvd.server.bodies import BodyBudget
from kvd.server.chat import chat_completions
from kvd.server.completions import completions
from kvd.server.guard import Guard
from kvd.server.interfaces import GenerationEngine
from kvd.server.limits import Limits
from kvd.server.middleware import Handler, add_common_headers, boundary
from kvd.server.openapi import openapi_document
from kvd.server.responses import error_response, short
from kvd.server.settings import ServerSettings
from kvd.server.state import STATE, ServerState
from kvd.text.text_model import TextModel

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/chat/completions", chat_completions),
    ("POST", "/completions", completions),
    ("POST", "/responses", responses_api.responses),
    ("POST", "/messages", messages_api.messages),
    ("POST", "/messages/count_tokens", messages_api.count_tokens),
    ("GET", "/models", operations.list_models),
    ("GET", "/models/{model:.+}", operations.retrieve_model),
    ("GET", "/health", operations.health),
    ("GET", "/metrics", operations.metrics),
    ("GET", "/openapi.json", openapi_document),
    ("POST", "/tokenize", operations.tokenize),
    ("POST", "/detokenize", operations.detokenize),
    ("GET", "/kvd/snapshot", control.snapshot),
    ("GET", "/kvd/events", control.events),
    ("GET", "/kvd/requests", control.list_requests),
    ("POST", "/kvd/requests/{request_id}/abort", control.abort_request),
    ("POST", "/kvd/requests/{request_id}/keep", cache_control.keep_turn),
    ("GET", "/kvd/requests/{request_id}/timeline", insight_routes.timeline),
    ("GET", "/kvd/timelines", insight_routes.timelines),
    ("GET", "/kvd/blocks", insight_routes.block_map),
    ("GET", "/kvd/doctor", insight_routes.doctor),
    ("GET", "/kvd/reveal/{name}", insight_routes.reveal),
    ("GET", "/kvd/log", insight_routes.log),
    ("GET", "/kvd/cache/prefixes", cache_control.list_prefixes),
    ("POST", "/kvd/cache/pin", cache_control.pin),
    ("POST", "/kvd/cache/unpin", cache_control.unpin),
    ("POST", "/kvd/cache/drop", cache_control.drop),
    ("POST", "/kvd/cache/reset", cache_control.reset),
    ("POST", "/kvd/sessions/{name}/save", cache_control.save_session),
    ("POST", "/kvd/sessions/{name}/restore", cache_control.restore_session),
)
"""Method, path without `/v1`, handler."""


def build_app(
    engine: GenerationEngine,
    text: TextModel,
    *,
    config: ServerSettings,
    event_log: EventLog | None = None,
    doctor: Examiner | None = None,
    host: Callable[[], HostFacts | None] = lambda: None,
) -> web.Application:
    """The application for one engine; run it with `kvd.server.lifecycle.serve`.

    doctor: what was told of every admission; without one /kvd/doctor is a 404. host: the latest facts
    about this machine, at once.
    """
    event_log = event_log or EventLog()
    app = web.Application(middlewares=[boundary], client_max_size=config.max_body_bytes)
    app[STATE] = ServerState(
        engine=engine,
        text=text,
        settings=config,
        guard=Guard(config),
        limits=Limits(config.max_waiting),
        bodies=BodyBudget(config.max_body_bytes_in_flight),
        event_log=event_log,
        console=LocalConsole(engine, event_log, doctor, text.decode, host=host),
        doctor=doctor,
        grammars=text.open_grammars(end_token_ids=config.end_token_ids, num_logits=engine.info.vocab_size),
    )
    for method, path, handler in ROUTES:
        for prefix in ("", "/v1"):
            app.router.add_route(method, prefix + path, handler, expect_handler=_answer_expectation)
            if method == "GET" and handler is not control.events:  # an endless answer has no length to tell
                app.router.add_route("HEAD", prefix + path, handler)
    app.on_response_prepare.append(add_common_headers)
    app.on_shutdown.append(_end_event_streams)
    return app


async def _answer_expectation(request: web.Request) -> web.StreamResponse | None:
    """`Expect: 100-continue` gets its interim answer; any other expectation is refused as JSON."""
    expectation = request.headers.get("Expect", "")
    if expectation.lower() == "100-continue":
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None
    return error_response(RequestError(f"expectation '{short(expectation)}' cannot be met", status=417))


async def _end_event_streams(app: web.Application) -> None:
    app[STATE].is_closing.set()
