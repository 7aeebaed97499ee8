"""What the handlers of one server share. Event loop only; the keys of the application's and requests'
storage.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from aiohttp import web

from kvd.core import Request
from kvd.errors import RequestError, ServerOverloaded
from kvd.observe.event_log import EventLog
from kvd.observe.local_console import Examiner, LocalConsole
from kvd.observe.metrics import MetricsExporter
from kvd.server.bodies import BodyBudget
from kvd.server.guard import Guard
from kvd.server.interfaces import GenerationEngine, TokenStream
from kvd.server.keys import Client
from kvd.server.limits import Limits
from kvd.server.responses import short
from kvd.server.settings import ServerSettings
from kvd.text.grammar import GrammarCompiler
from kvd.text.text_model import TextModel
from kvd.views import EngineInfo

MAX_RECENT_CHOICES = 256
"""HTTP requests whose choices are remembered, about as many as the engine remembers requests that ended."""


@dataclass(slots=True)
class ServerState:
    """Owned by the application; handlers reach it through `STATE`."""

    engine: GenerationEngine
    text: TextModel
    settings: ServerSettings
    guard: Guard
    limits: Limits
    bodies: BodyBudget
    event_log: EventLog
    console: LocalConsole
    doctor: Examiner | None
    grammars: GrammarCompiler
    metrics: MetricsExporter = field(default_factory=MetricsExporter)
    is_draining: bool = False
    is_closing: asyncio.Event = field(default_factory=asyncio.Event)
    active: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """HTTP request id → ids of its engine requests, while it runs."""
    recent_choices: OrderedDict[str, tuple[str, ...]] = field(default_factory=OrderedDict)
    """The same of the latest requests with several choices, also when they have ended."""

    def note_choices(self, request_id: str, engine_ids: tuple[str, ...]) -> None:
        """An HTTP request begins; whoever calls this takes it out of `active` at its end."""
        self.active[request_id] = engine_ids
        if len(engine_ids) > 1:
            self.recent_choices[request_id] = engine_ids
            if len(self.recent_choices) > MAX_RECENT_CHOICES:
                self.recent_choices.popitem(last=False)

    def note_answer(self, request_id: str, token_ids: Sequence[int]) -> None:
        """An engine request has ended with these tokens: the next turn of the conversation is judged by them."""
        if self.doctor is not None and token_ids:
            self.doctor.answered(request_id, token_ids)

    def engine_ids(self, request_id: str) -> tuple[str, ...]:
        """The engine's ids behind the one that an answer carries, whether it runs or has ended; any other as it is."""
        return self.active.get(request_id) or self.recent_choices.get(request_id) or (request_id,)

    def client(self, request: web.Request) -> Client:
        """Who asks, with the limits of the key that was used."""
        return request[CLIENT] if CLIENT in request else Client(describe_client(request))

    def submit(self, request: Request) -> TokenStream:
        """Queue an engine request under the limits of its client's key, and in that key's own part of the cache."""
        key = self.guard.key_ring.find(request.client)
        if key is None:
            return self.engine.submit(request)
        client = Client.of_key(key)
        if client.salt:
            request = replace(request, cache_salt=f"{client.salt} {request.cache_salt}")
        return self.limits.submit(client, lambda: self.engine.submit(request))

    def is_running(self, request_id: str) -> bool:
        """Whether an answer of this id, or a choice of one, is being made."""
        return request_id in self.active or any(request_id in ids for ids in self.active.values())

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.settings.served_names or self.engine.info.served_names

    @property
    def vocab_size(self) -> int:
        """Ids below it are tokens of both tokenizer and model."""
        return min(self.text.vocab_size, self.engine.info.vocab_size)

    @property
    def listed_names(self) -> tuple[str, ...]:
        """The names that clients are shown: the wildcard is no name."""
        return tuple(name for name in self.served_names if name != "*") or (self.engine.info.model,)

    def required_model(self, name: str | None) -> str:
        """The model name for the answer, as OpenAI's own routes want it: a request without one gets a 400."""
        if name is None:
            served = ", ".join(self.listed_names)
            raise RequestError(f"'model' is required; served here: {served}", param="model", code="missing_parameter")
        return self.resolve_model(name)

    def resolve_model(self, name: str | None) -> str:
        """The model name for the answer, the first if none is asked for; raises a 404 for one that is not served."""
        if name is None:
            return self.listed_names[0]
        if name in self.served_names or "*" in self.served_names:
            return name
        raise RequestError(
            f"model '{short(name)}' is not served here; served: {', '.join(self.listed_names)}",
            status=404,
            kind="not_found_error",
            code="model_not_found",
            param="model",
        )

    def check_accepting(self) -> None:
        """Raise a 503 while the server shuts down."""
        if self.is_draining:
            raise ServerOverloaded("the server is shutting down; try again later", retry_after_seconds=5)


STATE = web.AppKey("state", ServerState)

REQUEST_ID = web.RequestKey("request_id", str)
CLIENT = web.RequestKey("client", Client)
"""Set only where a key identified the client."""


def start_request_id(request: web.Request, prefix: str, *, separator: str = "-") -> str:
    """Give the request an id of the protocol's form; it is also the X-Request-Id of the answer."""
    request_id = f"{prefix}{separator}{uuid.uuid4().hex}"
    request[REQUEST_ID] = request_id
    return request_id


def describe_client(request: web.Request) -> str:
    """Who asks, for people: the key's name, else user agent and address."""
    if CLIENT in request:
        return request[CLIENT].name
    agent = short(request.headers.get("User-Agent", "unknown"), 60)
    return f"{agent} {request.remote or 'unknown'}"


def system_fingerprint(info: EngineInfo) -> str:
    """Changes when the model, its format or the arithmetic does, as clients that watch determinism expect."""
    facts = (info.version, info.model, info.quantization, info.kv_cache_dtype, info.backend)
    return "fp_" + hashlib.sha256("\0".join(facts).encode()).hexdigest()[:10]
