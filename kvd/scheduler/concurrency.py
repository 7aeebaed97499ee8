"""How many requests run at the same time, for `max_num_seqs: auto`: as many as make the server faster as a whole.

Owner: the engine thread. Reads no clock: it is told how long steps took.

Throughput rises with the number of running requests while the machine waits for its weights, then it stops, and it
falls once requests push each other out of memory. Only while requests wait can more be tried, and only then does the
limit matter, so only then is anything learnt:

  measure  The throughput at a limit is the median over `WINDOW` decode steps (every running request gets one token)
           with that many requests. Where prompts come all the time, it is the mean over `MIXED_WINDOW` steps of
           any kind; the two are never compared.
  search   From `START` twice as many are tried while that gains `GAIN`, else half as many while that loses nothing,
           then half as many more, and so on down to a tenth more or less. More must gain `GAIN`, fewer must not lose.
  hold     The limit stays. After `FIRST_HOLD` steps, twice as many each time that nothing came of it, or at once when
           throughput at the limit has changed by `DRIFT`, a quarter more and a quarter less are tried.
  recover  A preemption for want of blocks wastes work, so the limit falls at once below what ran, and rises again by
           an eighth per `FIRST_CALM` steps without another one, up to where it was; twice as many after a relapse,
           half as many after two rises in a row.

While steps of one kind take about the same time and enough requests wait, the search takes at most
`WINDOW` · (log2(maximum) + 8) decode steps at the limits tried, and ends within 10% of the greatest throughput of any
curve that rises, stays and falls, once each.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

START = 8
GAIN = 0.03
DRIFT = 0.2
WINDOW = 16
MIXED_WINDOW = 96
FIRST_HOLD = 512
MAX_HOLD = 4096
FIRST_CALM = 128
MAX_CALM = 1024

_SEARCH = ((2.0, True), (0.5, True), *((factor, False) for x in (1.5, 1.25, 1.1) for factor in (x, 1 / x)))
_REVIEW = ((1.25, True), (0.8, True))
"""Factors to try, and whether to go on in that direction while it helps."""


class _Throughput(NamedTuple):
    tokens_per_second: float
    is_mixed: bool  # over steps of any kind


class _Meter:
    """Throughput at one number of running requests."""

    __slots__ = ("_decode_rates", "_mixed_seconds", "_mixed_tokens", "_num_mixed", "num_requests")

    def __init__(self, num_requests: int) -> None:
        self.num_requests = num_requests
        self._decode_rates: list[float] = []
        self._mixed_tokens = 0
        self._mixed_seconds = 0.0
        self._num_mixed = 0

    def add(self, num_running: int, num_tokens: int, seconds: float) -> _Throughput | None:
        """Take in a step during which requests waited; the result once there are enough of them."""
        tolerance = self.num_requests // 16
        if not self.num_requests - tolerance <= num_running <= self.num_requests + tolerance:
            return None
        self._num_mixed += 1
        self._mixed_tokens += num_tokens
        self._mixed_seconds += seconds
        if self.num_requests - tolerance <= num_tokens <= num_running:
            self._decode_rates.append(num_tokens / seconds)
        if len(self._decode_rates) == WINDOW:
            return _Throughput(median(self._decode_rates), False)
        if self._num_mixed == MIXED_WINDOW:
            return _Throughput(self._mixed_tokens / self._mixed_seconds, True)
        return None


class ConcurrencyLimit:
    """See the module's docstring. Without `is_auto` the limit is `maximum` for ever."""

    def __init__(self, maximum: int, *, is_auto: bool) -> None:
        assert maximum >= 1, maximum
        self._maximum = maximum
        self._is_auto = is_auto
        self._base = min(START, maximum) if is_auto else maximum  # the best limit known
        self._limit = self._base
        self._known: dict[int, _Throughput] = {}  # what this search or review has measured
        self._moves: deque[tuple[float, bool]] = deque(_SEARCH)  # still to be tried
        self._move: tuple[float, bool] | None = None  # being tried; None: the base is measured
        self._meter = _Meter(self._limit)
        self._steps_held = 0  # since the latest search ended
        self._hold: int | None = None  # None: searching
        self._next_hold = FIRST_HOLD
        self._ceiling: int | None = None  # where recovery ends; None: not recovering
        self._num_calm = 0
        self._calm = FIRST_CALM
        self._has_risen = False  # since the latest preemption

    @property
    def limit(self) -> int:
        return self._limit

    def observe_step(
        self, num_running: int, num_waiting: int, num_tokens: int, seconds: float, num_preempted: int
    ) -> None:
        """A step computed `num_tokens` tokens; so many requests run and wait, so many gave way for want of blocks.

        Who gave way to a better priority is not counted: that says nothing about how many can run.
        """
        if not self._is_auto:
            return
        if num_preempted:
            self._fall(num_running, num_preempted)
        elif self._ceiling is not None:
            self._recover()
        else:
            self._learn(num_running, num_waiting, num_tokens, seconds)

    # ------------------------------------------------------------------ preemptions

    def _fall(self, num_running: int, num_preempted: int) -> None:
        if self._ceiling is None:
            self._ceiling = self._base
            self._calm = FIRST_CALM
        elif self._has_risen:
            self._calm = min(2 * self._calm, MAX_CALM)
        # What was only being tried above the base is given up with the first preemption.
        self._limit = max(1, min(self._base, self._limit - num_preempted, num_running))
        self._has_risen = False
        self._num_calm = 0

    def _recover(self) -> None:
        assert self._ceiling is not None
        self._num_calm += 1
        if self._num_calm < self._calm:
            return
        self._num_calm = 0
        if self._has_risen:
            self._calm = max(self._calm // 2, FIRST_CALM)
        self._has_risen = True
        self._limit = min(self._ceiling, self._limit + max(1, self._limit // 8))
        if self._limit == self._ceiling:
            self._ceiling = None
            self._review()

    # ------------------------------------------------------------------ search and hold

    def _learn(self, num_running: int, num_waiting: int, num_tokens: int, seconds: float) -> None:
        if self._hold is not None:
            self._steps_held += 1
        if not num_waiting or not num_tokens or seconds <= 0:
            return
        throughput = self._meter.add(num_running, num_tokens, seconds)
        if self._hold is not None:
            self._watch(throughput)
        elif throughput is not None:
            self._known[self._limit] = throughput
            self._judge()

    def _watch(self, throughput: _Throughput | None) -> None:
        """Hold the limit, until it is time to review it or there is a reason to."""
        assert self._hold is not None
        if throughput is not None:
            self._meter = _Meter(self._limit)
            before = self._known.setdefault(self._limit, throughput)
            if before.is_mixed != throughput.is_mixed:
                self._known[self._limit] = throughput
            elif abs(throughput.tokens_per_second / before.tokens_per_second - 1) > DRIFT:
                self._next_hold = FIRST_HOLD
                self._review()
                return
        if self._steps_held >= self._hold:
            self._review()

    def _review(self) -> None:
        """Measure the base anew, then its neighbours."""
        self._known.clear()
        self._moves = deque(_REVIEW)
        self._move = None
        self._hold = None
        self._try(self._base)

    def _judge(self) -> None:
        """Take over what was tried or drop it, and try what is next, as far as that has to be measured."""
        if self._move is not None:
            self._take_over(*self._move)
        while self._moves:
            self._move = self._moves.popleft()
            factor = self._move[0]
            target = round(self._base * factor)
            if target == self._base:
                target += 1 if factor > 1 else -1
            target = max(1, min(self._maximum, target))
            if target == self._base:
                continue
            self._try(target)
            if target not in self._known:
                return
            self._take_over(*self._move)
        self._start_hold()

    def _take_over(self, factor: float, repeats: bool) -> None:
        """Make the limit just measured the base, if it is worth it."""
        tried, base = self._known[self._limit], self._known[self._base]
        needed = base.tokens_per_second * (1 + GAIN if factor > 1 else 1)
        if tried.is_mixed != base.is_mixed or tried.tokens_per_second < needed:
            return
        self._base = self._limit
        self._next_hold = FIRST_HOLD
        if repeats:
            # What lies in the other direction was just left behind.
            self._moves = deque([(factor, True), *[move for move in self._moves if not move[1]]])

    def _start_hold(self) -> None:
        self._hold = self._next_hold
        self._next_hold = min(2 * self._next_hold, MAX_HOLD)
        self._steps_held = 0
        self._try(self._base)

    def _try(self, limit: int) -> None:
        self._limit = limit
        self._meter = _Meter(limit)
