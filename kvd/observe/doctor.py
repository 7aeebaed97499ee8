"""The prefix doctor: finds out, in a thread of its own, why requests computed what was known already.

Any thread may call a `Doctor`. The engine hands over admissions and answers and never waits; the doctor's thread
examines them one by one, in Python, so that it lets go of the interpreter every switch interval, and takes no more
than a share of a core. Invariants: what waits, what is remembered and what was found is bounded; every admission that
came is either examined or counted as skipped; no prompt text leaves but through `reveal`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from kvd.insight import Admission, DoctorReport, Reveal
from kvd.observe.doctor_causes import Decode, diagnose
from kvd.observe.doctor_findings import Findings
from kvd.observe.doctor_memory import PromptMemory
from kvd.observe.doctor_passages import decode_ids, encode

DEFAULT_MEMORY_TOKENS = 4_000_000
DEFAULT_SHARE = 0.02
BURST_SECONDS = 0.25
"""Processor time that the doctor may take at once after it has had nothing to do."""

MAX_WAITING = 4096
MAX_WAITING_TOKENS = 2_000_000
MAX_SECONDS_EACH = 0.5
"""Processor time after which the examination of a prompt is given up."""

_LOGGER = logging.getLogger(__name__)


class _TooCostly(Exception):
    """The examination of this prompt has taken too long."""


class _Closing(Exception):
    """The thread has to end."""


class _Answer(NamedTuple):
    """Tokens that were generated for a request."""

    request_id: str
    token_ids: tuple[int, ...]


class Doctor:
    """See the module's docstring.

    decode: token ids to text, any thread. clock: monotonic seconds, as in `Admission.time`. max_memory_tokens: of the
    prompts that are remembered, about 14 bytes each where none are alike. share: of one core, on average; 1 or more is
    no bound.
    """

    def __init__(
        self,
        decode: Decode,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_memory_tokens: int = DEFAULT_MEMORY_TOKENS,
        share: float = DEFAULT_SHARE,
        max_waiting: int = MAX_WAITING,
        max_waiting_tokens: int = MAX_WAITING_TOKENS,
    ) -> None:
        self._decode = decode
        self._clock = clock
        self._max_memory_tokens = max_memory_tokens
        self._share = share
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._queue: SimpleQueue[tuple[int, Admission | _Answer | threading.Event]] = SimpleQueue()
        self._gate = threading.Lock()  # between those who hand over; the doctor's own thread never takes it
        self._num_tokens_put = 0
        self._num_dropped = 0
        self._generation = 0
        self._num_tokens_taken = 0  # the thread's, as all that follows but the findings
        self._memory = PromptMemory(max_memory_tokens)
        self._memory_generation = 0
        self._balance_seconds = BURST_SECONDS
        self._balanced_at = clock()
        self._balanced_thread_seconds = 0.0
        self._give_up_at = 0.0
        self._lock = threading.Lock()  # over what follows
        self._findings = Findings()
        self._counts = self._findings.by_cause()  # replaced as a whole, read without the lock
        self._num_skipped = 0
        self._seconds_spent = 0.0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kvd-doctor", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ handing over

    def admitted(self, admissions: Sequence[Admission]) -> None:
        """Requests were admitted. Never waits; what comes while too many wait is counted as skipped."""
        with self._gate:
            for admission in admissions:
                if not self._put(admission, len(admission.prompt_token_ids)):
                    self._num_dropped += 1

    def answered(self, request_id: str, token_ids: Sequence[int]) -> None:
        """A request that was admitted ended with this answer, now cached behind its prompt. Never waits.

        The last token was never computed, so it is not remembered.
        """
        with self._gate:
            answer = _Answer(request_id, tuple(token_ids[:-1]))
            self._put(answer, len(answer.token_ids))

    def _put(self, item: Admission | _Answer, num_tokens: int) -> bool:
        num_waiting_tokens = self._num_tokens_put - self._num_tokens_taken
        if self._queue.qsize() >= self._max_waiting or num_waiting_tokens + num_tokens > self._max_waiting_tokens:
            return False
        self._num_tokens_put += num_tokens
        self._queue.put((self._generation, item))
        return True

    def reset(self) -> None:
        """Forget what was found, and every prompt."""
        with self._gate, self._lock:
            self._generation += 1
            self._findings = Findings()
            self._counts = self._findings.by_cause()
            self._num_skipped = self._num_dropped = 0

    def close(self) -> None:
        """End the thread; what waits is not examined any more."""
        self._is_closing.set()
        self._queue.put((0, threading.Event()))
        self._thread.join()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until everything that was handed over has been examined; False: it was not, in that time."""
        is_done = threading.Event()
        self._queue.put((0, is_done))
        return is_done.wait(timeout_seconds)

    # ------------------------------------------------------------------ what was found

    def report(self, prefill_tokens_per_second: float) -> DoctorReport:
        """What was found since the start or the last reset. The rate, as measured, gives what it costs; 0: unknown."""
        with self._lock:
            found = self._findings
            return DoctorReport(
                findings=found.ranked(prefill_tokens_per_second),
                recent=found.recent(),
                num_examined=found.num_examined,
                num_skipped=self._num_skipped + self._num_dropped,
                prompt_tokens=found.prompt_tokens,
                cached_tokens=found.cached_tokens,
                lost_tokens=found.lost_tokens,
                prefill_tokens_per_second=max(0.0, prefill_tokens_per_second),
                seconds_spent=self._seconds_spent,
                by_cause=found.by_cause(),
            )

    def counts(self) -> tuple[tuple[str, int, int], ...]:
        """(cause, requests, lost tokens) of every cause; at once."""
        return self._counts

    def reveal(self, request_id: str) -> Reveal | None:
        """The text around the place where a prompt differs from an earlier one; None: nothing is kept of it."""
        with self._lock:
            evidence = self._findings.evidence(request_id)
        if evidence is None:
            return None
        ours, theirs = (self._decode(decode_ids(data)) for data in (evidence.ours, evidence.theirs))
        return Reveal(title=f"{request_id}: {evidence.miss.words}", ours=ours, theirs=theirs)

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        try:
            while True:
                generation, item = self._queue.get()
                if isinstance(item, threading.Event):
                    if self._is_closing.is_set():
                        return
                    item.set()
                    continue
                self._num_tokens_taken += len(item.token_ids if isinstance(item, _Answer) else item.prompt_token_ids)
                self._wait_for_balance()
                self._take(generation, item)
        except _Closing:
            return

    def _take(self, generation: int, item: Admission | _Answer) -> None:
        with self._lock:
            if generation != self._generation:
                return
            findings = self._findings
        if self._memory_generation != generation:
            self._memory, self._memory_generation = PromptMemory(self._max_memory_tokens), generation
        self._give_up_at = time.thread_time() + MAX_SECONDS_EACH
        try:
            if isinstance(item, _Answer):
                data = encode(item.token_ids)
                self._remember(lambda: self._memory.answered(item.request_id, data, self._wait_for_balance))
                return
            self._examine(item, findings)
        except _TooCostly:
            with self._lock:
                self._num_skipped += 1
        except _Closing:
            raise
        except Exception:
            # Nothing depends on an explanation: the server goes on, and the fault is in the log.
            _LOGGER.exception("the prefix doctor could not examine request %s", item.request_id)
            with self._lock:
                self._num_skipped += not isinstance(item, _Answer)
        with self._lock:
            self._seconds_spent = time.thread_time()

    def _examine(self, admission: Admission, findings: Findings) -> None:
        if admission.is_excused:
            with self._lock:
                findings.num_examined += 1
            return
        time_of_day = time.time() + admission.time - self._clock()
        data = encode(admission.prompt_token_ids)
        try:
            diagnosis = diagnose(self._memory, admission, data, self._decode, self._pace)
        finally:
            names = admission.request_id, admission.client, admission.endpoint, admission.cache_salt
            self._remember(lambda: self._memory.add(*names, admission.time, data, self._wait_for_balance))
        with self._lock:
            findings.num_examined += 1
            findings.count(admission)
            if diagnosis is not None:
                findings.add(admission, diagnosis, time_of_day)
                if findings is self._findings:
                    self._counts = findings.by_cause()

    def _remember(self, change: Callable[[], None]) -> None:
        """Change the memory; where that fails half-way, nothing in it is to be trusted, and it begins anew."""
        try:
            change()
        except BaseException:
            self._memory = PromptMemory(self._max_memory_tokens)
            raise

    def _pace(self) -> None:
        """Wait until the doctor may go on. Raises _TooCostly where it has been at it for too long."""
        if time.thread_time() > self._give_up_at:
            raise _TooCostly
        self._wait_for_balance()

    def _wait_for_balance(self) -> None:
        if self._share >= 1:
            return
        now, spent = self._clock(), time.thread_time()
        earned = (now - self._balanced_at) * self._share
        self._balance_seconds = min(BURST_SECONDS, self._balance_seconds + earned)
        self._balance_seconds -= spent - self._balanced_thread_seconds
        self._balanced_at, self._balanced_thread_seconds = now, spent
        if self._balance_seconds < 0 and self._is_closing.wait(-self._balance_seconds / self._share):
            raise _Closing
