"""A scripted engine and a tiny real tokenizer, so that the server is tested without a model.

The tokenizer has one token per byte, so every non-ASCII character comes in several tokens. The engine answers every
request with the same tokens, one per permit of `permits`, which a test may hand out one by one.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvd.core import FinishReason, Logprobs, Request, TokenEvent
from kvd.engine.streams import TokenStream
from kvd.errors import RequestError, SessionError
from kvd.histograms import BUCKET_BOUNDS, HistogramBuilder
from kvd.text.text_model import TextModel
from kvd.views import Counters, EngineInfo, MemoryBudget, PrefixView, RequestView, SessionInfo, Snapshot, StepMix
from tests.server.fake_insight import InsightOfEngine

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>")
BEGIN, END, IM_START, IM_END = range(256, 260)
VOCAB_SIZE = 260
MAX_MODEL_LEN = 1024
MODEL = "tiny/test-model"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_text_model(
    folder: Path, more_special_tokens: Sequence[str] = (), *, chat_template: str = CHAT_TEMPLATE, **options: str
) -> TextModel:
    """A byte-level tokenizer whose id n is byte n, with a BOS and a ChatML template."""
    alphabet = _byte_characters()
    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special_tokens = (*SPECIAL_TOKENS, *more_special_tokens)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special_tokens])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    text = TextModel(
        path,
        chat_template=chat_template,
        adds_bos=True,
        bos_token_id=BEGIN,
        special_tokens={"bos_token": "<|begin|>", "eos_token": "<|end|>"},
        **options,
    )
    assert text.encode_prompt("é") == [BEGIN, *"é".encode()]
    return text


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def build_info(**changes: object) -> EngineInfo:
    info = EngineInfo(
        model=MODEL,
        served_names=(MODEL, "alias"),
        architecture="llama",
        quantization="gguf q4_1",
        backend="fake",
        device="cpu",
        kv_cache_dtype="int8",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        vocab_size=VOCAB_SIZE,
        prefix_caching=True,
        budget=MemoryBudget(2**30, 2**20, 2**20, 2**24, 100, 2**17, 7000.5, 12000.0),
        created=1_700_000_000,
        version="0.1.0",
    )
    return replace(info, **changes)  # type: ignore[arg-type]


class FakeEngine(InsightOfEngine):
    """Answers every request alike; implements the server's `GenerationEngine`.

    reply           text of every answer; then the end token
    permits         None: as fast as the loop allows; else one permit per token
    permits_of      the same for single choices, by their index
    batch           tokens per wake-up
    refusal         raised by `submit`
    fail_after      the request ends with an error after so many tokens
    num_dropped     tokens that every request has forgotten from its second token on
    chains          what can be pinned, kept and saved → blocks; ids of requests that ended are added with 3
    sessions        name → saved chain
    """

    def __init__(self, text: TextModel, **info: object) -> None:
        super().__init__()
        self.info = build_info(**info)
        self.text = text
        self.reply = "Hello world"
        self.num_cached_tokens = 0
        self.permits: asyncio.Semaphore | None = None
        self.permits_of: dict[int, asyncio.Semaphore] = {}
        self.batch = 1
        self.refusal: RequestError | None = None
        self.num_accepted_before_refusal = 0
        self.fail_after: int | None = None
        self.health_line: str | None = None
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.num_resets = 0
        self.num_dropped = 0
        self.chains: dict[str, int] = {"ab" * 16: 5}
        self.pinned: set[str] = set()
        self.kept: list[str] = []
        self.sessions: dict[str, str] = {}
        self.counters = Counters()
        self._changed = asyncio.Event()
        self._running: dict[str, tuple[TokenStream, asyncio.Task[None]]] = {}
        self._histograms = {name: HistogramBuilder(bounds) for name, bounds in BUCKET_BOUNDS.items()}

    @property
    def running_ids(self) -> set[str]:
        return set(self._running)

    # ------------------------------------------------------------------ GenerationEngine

    def submit(self, request: Request) -> TokenStream:
        if self.refusal is not None and len(self.submitted) >= self.num_accepted_before_refusal:
            raise self.refusal
        self.submitted.append(request)
        stream = TokenStream(request.request_id, self._end_early)
        self._running[request.request_id] = stream, asyncio.create_task(self._generate(request, stream))
        self._changed.set()
        return stream

    def health(self) -> str | None:
        return self.health_line

    async def abort(self, request_id: str) -> bool:
        return self._end_early(request_id)

    async def reset_cache(self) -> int:
        self.num_resets += 1
        return 7

    async def prefixes(self, limit: int) -> tuple[PrefixView, ...]:
        ranked = sorted(self.chains, key=lambda chain: chain not in self.pinned)
        return tuple(PrefixView(chain, 16 * self.chains[chain], 2, chain in self.pinned, False) for chain in ranked)[
            :limit
        ]

    async def pin(self, chain: str) -> int:
        if chain not in self.chains:
            return 0
        self.pinned.add(chain)
        return self.chains[chain]

    async def unpin(self, chain: str) -> bool:
        was_pinned = chain in self.pinned
        self.pinned.discard(chain)
        return was_pinned

    async def drop_prefix(self, chain: str) -> int:
        if chain in self.pinned:
            return 0
        self.dropped.append(chain)
        return self.chains.pop(chain, 0)

    async def keep_turn(self, request_id: str) -> int:
        self.kept.append(request_id)
        return self.chains.get(request_id, 0)

    async def save_session(self, name: str, chain: str) -> SessionInfo:
        if chain not in self.chains:
            raise SessionError(f"there is no chain '{chain}' in the cache", param="chain")
        self.sessions[name] = chain
        return SessionInfo(name, 16 * self.chains[chain], 1000)

    async def restore_session(self, name: str) -> SessionInfo:
        if name not in self.sessions:
            raise SessionError(f"there is no session '{name}'", param="name", status=404)
        return SessionInfo(name, 16 * self.chains[self.sessions[name]], 1000)

    async def snapshot(self, *, details: bool = False) -> Snapshot:
        return Snapshot(
            time=time.monotonic(),
            uptime_seconds=12.5,
            info=self.info,
            state="ready",
            num_running=len(self._running),
            num_waiting=2,
            num_blocks=100,
            num_blocks_active=25,
            num_blocks_cached=40,
            num_blocks_free=35,
            counters=self.counters,
            last_step=StepMix(1, 2, 3, 0.5),
            num_blocks_pinned=sum(self.chains[chain] for chain in self.pinned),
            num_ram_blocks=50,
            num_ram_blocks_used=30,
            running_limit=12,
            step_budget=80,
            histograms={name: builder.freeze() for name, builder in self._histograms.items()},
            requests=tuple(map(self._view, self._running)) if details else (),
        )

    # ------------------------------------------------------------------ for tests

    def observe(self, name: str, *values: float) -> None:
        for value in values:
            self._histograms[name].observe(value)

    async def close(self) -> None:
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def reach(self, num_running: int) -> None:
        """Wait until so many requests run."""
        while len(self._running) != num_running:
            self._changed.clear()
            await self._changed.wait()

    # ------------------------------------------------------------------ inside

    def _end_early(self, request_id: str, reason: FinishReason = "abort") -> bool:
        if request_id not in self._running:
            return False
        stream, task = self._running[request_id]
        self._forget(request_id)
        task.cancel()
        self.aborted.append(request_id)
        stream.put(TokenEvent(request_id, None, 1, 0, 0, finish_reason=reason))
        return True

    def _forget(self, request_id: str) -> None:
        del self._running[request_id]
        self._changed.set()

    async def _generate(self, request: Request, stream: TokenStream) -> None:
        reply = [*self.reply.encode(), END]
        sampling = request.sampling
        for position in range(sampling.max_tokens):
            permits = self.permits_of.get(request.choice_index, self.permits)
            if permits is not None:
                await permits.acquire()
            elif position % self.batch == 0:
                await asyncio.sleep(0)
            if position == self.fail_after:
                self._forget(request.request_id)
                stream.put(self._event(request, position, None, "error", error="step 3 failed: planted"))
                return
            token_id = reply[position] if position < len(reply) else ord("!")
            finish_reason: FinishReason | None = None
            if token_id in sampling.stop_token_ids:
                finish_reason = "stop"
            elif position + 1 == sampling.max_tokens:
                finish_reason = "length"
            if finish_reason is not None:
                self._forget(request.request_id)
                self.chains[request.request_id] = 3
            stream.put(self._event(request, position + 1, token_id, finish_reason))
            if finish_reason is not None:
                return

    def _event(
        self,
        request: Request,
        num_output_tokens: int,
        token_id: int | None,
        finish_reason: FinishReason | None,
        error: str | None = None,
    ) -> TokenEvent:
        logprobs = None
        if request.sampling.num_logprobs is not None and token_id is not None:
            others = [(token_id, -0.25)] + [((token_id + n) % 256, -math.inf) for n in range(1, 21)]
            logprobs = Logprobs(-0.25, tuple(others[: request.sampling.num_logprobs]))
        prompt_logprobs = None
        if request.num_prompt_logprobs is not None and num_output_tokens == 1:
            prompt_logprobs = score_prompt(request.prompt_token_ids, request.num_prompt_logprobs)
        return TokenEvent(
            request_id=request.request_id,
            token_id=token_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=num_output_tokens,
            logprobs=logprobs,
            finish_reason=finish_reason,
            error=error,
            num_dropped_tokens=self.num_dropped if num_output_tokens > 1 else 0,
            prompt_logprobs=prompt_logprobs,
        )

    def _view(self, request_id: str) -> RequestView:
        request = next(each for each in self.submitted if each.request_id == request_id)
        num_prompt_tokens = len(request.prompt_token_ids)
        return RequestView(
            request_id, request.client, request.endpoint, "decode", request.priority, 1.5, num_prompt_tokens, 0,
            num_prompt_tokens, 1, request.sampling.max_tokens, 2, 0, None, None,
        )  # fmt: skip


def score_prompt(prompt: Sequence[int], num_logprobs: int) -> tuple[Logprobs | None, ...]:
    """What the fake engine says of a prompt: token n has the log probability −n, and "?" is always likelier."""
    scores = [
        Logprobs(-float(position), ((ord("?"), -0.5), (token_id, -float(position)))[:num_logprobs])
        for position, token_id in enumerate(prompt[1:], 1)
    ]
    return (None, *scores)


def parse_events(body: str) -> list[dict[str, object]]:
    """The JSON of every data line but the last, which must be [DONE]."""
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
