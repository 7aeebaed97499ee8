"""Which tokens the grammars of running requests allow next, computed beside the steps.

Purpose: a mask takes some 0.1 ms as a rule, and 100 ms for a grammar that is ambiguous enough. As soon as a token was
sampled, a worker takes it in and computes the next mask, while the engine commits, plans and computes.
Owner: the engine thread; it alone calls what is in here. A worker touches a run between `accept` and its return.
Invariant: a run is ready when its mask is that of the token to be sampled next.

Who waits for whom: before a plan the engine waits `GRACE_SECONDS` at most, and leaves those out that are not ready
then (`unready`). So a slow grammar holds up nobody but itself. Where steps are launched ahead, a request whose token is
still in flight makes the launch wait, as penalties do; where its latest mask was slow, or none was computed yet, it is
left out instead until that token has landed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable

import numpy as np
import torch

from kvd.core import Grammar, Request

GRACE_SECONDS = 0.002
NUM_WORKERS = 2
"""More would take processors away from a model that computes on them."""


class GrammarRun:
    """One request's way through its grammar, preemptions included.

    error          why the grammar cannot be followed any further; the token sampled then means nothing
    is_slow        its latest mask took longer than the grace
    is_new         no mask was computed for it yet, so nobody knows how long one takes
    num_in_flight  launched steps that choose a token for it
    """

    __slots__ = (
        "_end_bits", "_fault", "_mask", "_matcher", "_min_position", "_stop_bits", "_token_id", "end_token_ids",
        "is_new", "is_ready", "is_slow", "num_in_flight",
    )  # fmt: skip

    def __init__(self, request: Request, grammar: Grammar) -> None:
        params = request.sampling
        self.end_token_ids = grammar.end_token_ids
        self.is_ready = True
        self.is_slow = False
        self.is_new = True
        self.num_in_flight = 0
        self._matcher = grammar.start()
        self._mask = np.frombuffer(grammar.first_mask, dtype=np.int32)
        self._token_id = -1
        self._fault: str | None = None
        ignored = () if params.stop_token_ids & self.end_token_ids else self.end_token_ids
        self._end_bits = _bits(ignored, len(self._mask))
        self._stop_bits = _bits((*ignored, *params.stop_token_ids), len(self._mask))
        self._min_position = len(request.prompt_token_ids) + params.min_tokens

    @property
    def error(self) -> str | None:
        return self._fault or self._matcher.error

    def mask(self, position: int) -> torch.Tensor:
        """int32 words for the token at `position`.

        Without the end tokens that the request ignores, and before min_tokens without stop tokens, unless the grammar
        allows nothing else. After an error every token is allowed.
        """
        assert self.is_ready
        if self.error is not None:
            return torch.full((len(self._mask),), -1, dtype=torch.int32)
        avoided = self._stop_bits if position < self._min_position else self._end_bits
        left = self._mask & ~avoided
        return torch.from_numpy(left if left.any() else self._mask.copy())

    def advance(self) -> None:
        """A worker's part."""
        started = time.monotonic()
        try:
            self._matcher.accept(self._token_id)
            self._mask = np.frombuffer(self._matcher.mask(), dtype=np.int32)
        except BaseException as error:  # a panic is no Exception; it is this request that has to end, not the worker
            self._fault = f"the grammar failed: {type(error).__name__}: {error}"
        self.is_slow = time.monotonic() - started > GRACE_SECONDS
        self.is_new = False

    def note(self, token_id: int) -> None:
        """What the worker is to take in."""
        self._token_id = token_id
        self.is_ready = False


def _bits(token_ids: Iterable[int], num_words: int) -> np.ndarray:
    bits = np.zeros(32 * num_words, dtype=np.uint8)
    bits[[token_id for token_id in token_ids if token_id < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class GrammarMasks:
    """The runs of all requests that have a grammar, and the workers, which start with the first of them."""

    def __init__(self) -> None:
        self._runs: dict[str, GrammarRun] = {}
        self._todo: queue.SimpleQueue[GrammarRun | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[GrammarRun] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def add(self, request: Request) -> GrammarRun | None:
        """None: the request has no grammar."""
        if request.grammar is None:
            return None
        run = self._runs[request.request_id] = GrammarRun(request, request.grammar)
        return run

    def forget(self, request_id: str) -> None:
        self._runs.pop(request_id, None)

    def accept(self, run: GrammarRun, token_id: int) -> None:
        """Have the next mask computed, now that a token was sampled."""
        assert run.is_ready, "a token was sampled without its mask"
        if len(self._threads) < NUM_WORKERS:
            thread = threading.Thread(target=self._work, name="kvd-grammar", daemon=True)
            self._threads.append(thread)
            thread.start()
        run.note(token_id)
        self._todo.put(run)

    def require(self, runs: Iterable[GrammarRun]) -> None:
        """Wait until these are ready."""
        for run in runs:
            while not run.is_ready:
                self._take(None)

    def unready(self) -> frozenset[str]:
        """The requests that are not to be planned now; see the module."""
        if not self._runs:
            return frozenset()
        deadline = time.monotonic() + GRACE_SECONDS
        for run in self._runs.values():
            while not (run.is_ready or run.is_slow):
                if not self._take(max(0.0, deadline - time.monotonic())):
                    run.is_slow = True  # its worker will say
        self._take(0.0)
        return frozenset(
            request_id
            for request_id, run in self._runs.items()
            if not run.is_ready or (run.num_in_flight and (run.is_slow or run.is_new))
        )

    def await_one(self, timeout: float) -> None:
        """Until some run gets ready."""
        self._take(timeout)

    def close(self) -> None:
        """End the workers."""
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _take(self, timeout: float | None) -> bool:
        """Take what has come back, and wait up to `timeout` seconds for the first; False: nothing has."""
        num_taken = 0
        while True:
            try:
                run = self._done.get(timeout != 0.0 and not num_taken, timeout)
            except queue.Empty:
                return num_taken > 0
            num_taken += 1
            run.is_ready = True

    def _work(self) -> None:
        while (run := self._todo.get()) is not None:
            run.advance()
            self._done.put(run)
