"""How fast this machine is, learnt from the steps it has run: decoding, prefill, and moving blocks between tiers.

Owner: the engine thread. Nothing in here reads a clock: seconds are handed in, and every rate can be fixed instead, so
that a test decides by counts alone.

A rate is a quantile over the latest observations, each weighted by its size, with no single one above a
fifth of the weight: a step that was held up by something else moves nothing, a lasting change is taken over within a
window, and a few tiny chunks do not outvote a large one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Literal, get_args

RateName = Literal[
    "prefill_tokens_per_second",
    "decode_base_seconds",
    "decode_seconds_per_request",
    "save_bytes_per_second",
    "restore_bytes_per_second",
    "disk_bytes_per_second",
]
RATE_NAMES: tuple[str, ...] = get_args(RateName)
"""What can be fixed. The two of decoding go together: a decode step takes base + n · per request."""

FIRST_PREFILL_TOKENS = 64
"""Prefill tokens of a step beside decodes while nothing is known about the speed of prefill."""

_WINDOW = 16
_DECODE_WINDOW = 9
_PREFILL_QUANTILE = (
    0.7  # of seconds per token: rather a little late with a prompt than late with everybody's next token
)
_PREFILL_WINDOW = 32
_MIN_TRANSFERS = 3
_MIN_LEARNT_TOKENS = 8  # what a smaller chunk takes says more about the step than about prefill
_REFUSALS_PER_DOUBT = 32


class _Samples:
    """The latest (seconds, amount) pairs, and a quantile of the seconds per unit over them."""

    __slots__ = ("_quantile", "_samples", "_seconds_per_unit")

    def __init__(self, quantile: float) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._quantile = quantile
        self._seconds_per_unit: float | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, seconds: float, amount: float) -> None:
        self._samples.append((seconds / amount, amount))
        self._seconds_per_unit = None

    def drop_oldest(self) -> None:
        self._samples.popleft()
        self._seconds_per_unit = None

    @property
    def per_second(self) -> float | None:
        """Units per second; None without samples."""
        if not self._samples:
            return None
        if self._seconds_per_unit is None:
            # With fewer the upper quantile would be the slowest of all, which is often the very first one.
            quantile = self._quantile if len(self._samples) >= 4 else 0.5
            self._seconds_per_unit = _weighted_quantile(list(self._samples), quantile)
        return 1 / self._seconds_per_unit


class _PrefillCurve:
    """How much longer prefill tokens make a step, by their number, from the latest steps that had any.

    One rate would not do: while the machine waits for its weights, more tokens cost next to nothing, and beyond some
    number they suddenly do. Points are medians per power of two, straight lines lie between them, and nobody goes
    beyond twice the largest.
    """

    __slots__ = ("_points", "_steps")

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=_PREFILL_WINDOW)
        self._points: list[tuple[float, float]] | None = None

    def add(self, num_tokens: int, seconds: float) -> None:
        self._steps.append((num_tokens, seconds))
        self._points = None

    def points(self) -> list[tuple[float, float]]:
        """(tokens, seconds), rising in both."""
        if self._points is None:
            by_size: dict[int, list[tuple[int, float]]] = {}
            for num_tokens, seconds in self._steps:
                by_size.setdefault(num_tokens.bit_length(), []).append((num_tokens, seconds / num_tokens))
            self._points = []
            total, per_token = 0.0, 0.0
            for _, steps in sorted(by_size.items()):
                middle = len(steps) // 2
                num_tokens = sorted(tokens for tokens, _ in steps)[middle]
                # A token of a larger chunk is not much cheaper: a lone fast step must not open the gates.
                per_token = max(sorted(seconds for _, seconds in steps)[middle], per_token / 2)
                total = max(total, per_token * num_tokens)
                self._points.append((num_tokens, total))
        return self._points

    def tokens_within(self, seconds: float) -> float | None:
        """Tokens that make a step at most so much longer; None: nothing is known."""
        points = self.points()
        if not points:
            return None
        low = (0.0, 0.0)
        slope = 0.0
        for point in points:
            slope = (point[1] - low[1]) / (point[0] - low[0])
            if point[1] > seconds:
                return low[0] + max(0.0, seconds - low[1]) / slope
            low = point
        slope = max(slope, low[1] / low[0])
        return min(low[0] + (seconds - low[1]) / slope, max(2 * low[0], FIRST_PREFILL_TOKENS))


class Rates:
    """Measured or fixed speeds; a property is None until something is known.

    fixed: values by `RATE_NAMES` that no observation changes.
    """

    def __init__(self, fixed: Mapping[str, float] | None = None) -> None:
        self._fixed = dict(fixed or {})
        unknown = self._fixed.keys() - set(RATE_NAMES)
        assert not unknown, f"rates that do not exist: {sorted(unknown)}"
        assert all(value > 0 for name, value in self._fixed.items() if name != "decode_base_seconds"), self._fixed
        names = {"decode_base_seconds", "decode_seconds_per_request"} & self._fixed.keys()
        assert len(names) != 1, "the two rates of decoding are fixed together"
        self._prefill = _Samples(_PREFILL_QUANTILE)
        self._prefill_curve = _PrefillCurve()
        self._transfers = {name: _Samples(0.5) for name in RATE_NAMES if "bytes" in name}
        # By bit length of the number of decodes: (decodes, seconds) of the latest steps, and the medians of both.
        self._decodes: dict[int, deque[tuple[int, float]]] = {}
        self._decode_points: dict[int, tuple[int, float]] = {}
        self._num_refusals = 0

    # ------------------------------------------------------------------ observing

    def observe_step(self, num_prefill: int, num_decode: int, seconds: float) -> None:
        """A step computed so many tokens of each kind; `seconds` without saves and restores.

        Steps that only decode teach the time of decoding, the others how much longer prefill tokens make a
        step. While no time of decoding is known, a mixed step is put down to its prefill tokens: too slow, which
        is the safe side.
        """
        if seconds <= 0:
            return
        if num_prefill >= _MIN_LEARNT_TOKENS:
            # No token is cheaper than an equal share of a step that hides it entirely behind the weights it reads.
            least = seconds * num_prefill / (num_prefill + num_decode) / 8
            beyond = seconds - (self.decode_seconds(num_decode) or 0.0)
            self._prefill.add(max(beyond, least), num_prefill)
            self._prefill_curve.add(num_prefill, max(beyond, least))
        elif not num_prefill and num_decode:
            bucket = num_decode.bit_length()
            steps = self._decodes.setdefault(bucket, deque(maxlen=_DECODE_WINDOW))
            steps.append((num_decode, seconds))
            self._decode_points[bucket] = (
                sorted(count for count, _ in steps)[len(steps) // 2],
                sorted(time for _, time in steps)[(len(steps) - 1) // 2],
            )

    def observe_save(self, num_bytes: int, seconds: float) -> None:
        """So many bytes went from the KV pool to the RAM tier."""
        self._observe("save_bytes_per_second", num_bytes, seconds)

    def observe_restore(self, num_bytes: int, seconds: float) -> None:
        """So many bytes went from the RAM tier to the KV pool."""
        self._observe("restore_bytes_per_second", num_bytes, seconds)

    def observe_disk(self, num_bytes: int, seconds: float) -> None:
        """So many bytes were read from the disk tier into the RAM tier. To be told once of each measurement."""
        self._observe("disk_bytes_per_second", num_bytes, seconds)

    def _observe(self, name: str, num_bytes: int, seconds: float) -> None:
        if num_bytes > 0 and seconds > 0:
            self._transfers[name].add(seconds, num_bytes)

    def doubt_transfers(self, *names: RateName) -> None:
        """A transfer was refused because of these rates. What is never done is never measured again, so after
        enough refusals the oldest observations are forgotten, one by one, until it is tried anew."""
        self._num_refusals += 1
        if self._num_refusals % _REFUSALS_PER_DOUBT == 0:
            for name in names:
                if len(self._transfers[name]):
                    self._transfers[name].drop_oldest()

    # ------------------------------------------------------------------ what is known

    @property
    def prefill_tokens_per_second(self) -> float | None:
        return self._fixed.get("prefill_tokens_per_second", self._prefill.per_second)

    @property
    def save_bytes_per_second(self) -> float | None:
        return self._transfer_rate("save_bytes_per_second")

    @property
    def restore_bytes_per_second(self) -> float | None:
        return self._transfer_rate("restore_bytes_per_second")

    @property
    def disk_bytes_per_second(self) -> float | None:
        return self._transfer_rate("disk_bytes_per_second")

    def _transfer_rate(self, name: RateName) -> float | None:
        if name in self._fixed:
            return self._fixed[name]
        samples = self._transfers[name]
        return samples.per_second if len(samples) >= _MIN_TRANSFERS else None

    def prefill_tokens_within(self, seconds: float) -> float | None:
        """Prefill tokens that make a step at most `seconds` longer; None: nothing is known.

        Seconds times a fixed rate of prefill, or what the steps of about that size have taken.
        """
        if "prefill_tokens_per_second" in self._fixed:
            return seconds * self._fixed["prefill_tokens_per_second"]
        return self._prefill_curve.tokens_within(seconds)

    def decode_seconds(self, num_decodes: int) -> float | None:
        """How long a step takes that computes the newest token of so many requests; None: nothing is known.

        Linear between the numbers that were seen (medians per power of two). Below the smallest as long as there, above
        the largest in proportion: both are upper bounds of a cost that grows with the number and starts above 0.
        """
        if not num_decodes:
            return 0.0
        if "decode_base_seconds" in self._fixed:
            base, slope = self._fixed["decode_base_seconds"], self._fixed["decode_seconds_per_request"]
            return base + slope * num_decodes
        below: tuple[int, float] | None = None
        for bucket in sorted(self._decode_points):
            count, seconds = self._decode_points[bucket]
            if count == num_decodes:
                return seconds
            if count > num_decodes:
                if below is None:
                    return seconds
                share = (num_decodes - below[0]) / (count - below[0])
                return below[1] + share * (seconds - below[1])
            below = (count, seconds)
        return None if below is None else below[1] * num_decodes / below[0]


def step_budget(
    rates: Rates,
    *,
    target_seconds: float | None,
    max_tokens: int,
    num_decodes: int,
    min_prefill_tokens: int = 16,
) -> int:
    """Tokens that one step may compute, those of the `num_decodes` requests that decode included.

    (target − decode time) · prefill rate (the rate at that size) prefill tokens, at least `min_prefill_tokens` so that
    prompts advance however slow the machine is, at most `max_tokens` in all. Without a target, and while nobody
    decodes, `max_tokens`.
    """
    if target_seconds is None or not num_decodes:
        return max_tokens
    num_prefill = rates.prefill_tokens_within(max(0.0, target_seconds - (rates.decode_seconds(num_decodes) or 0.0)))
    if num_prefill is None:
        num_prefill = FIRST_PREFILL_TOKENS
    return min(max_tokens, num_decodes + max(min_prefill_tokens, int(min(num_prefill, max_tokens))))


def restore_beats_recompute(rates: Rates, num_bytes: int, num_tokens: int, *, from_disk: bool) -> bool:
    """Whether bringing `num_bytes` back is faster than computing their `num_tokens` tokens.

    As long as a rate is unknown it is, so that it gets measured.
    """
    prefill, restore, disk = (
        rates.prefill_tokens_per_second,
        rates.restore_bytes_per_second,
        rates.disk_bytes_per_second,
    )
    if prefill is None or restore is None or (from_disk and disk is None):
        return True
    seconds = num_bytes / restore
    if from_disk and disk is not None:
        seconds += num_bytes / disk
    if seconds <= num_tokens / prefill:
        return True
    if from_disk:
        rates.doubt_transfers("restore_bytes_per_second", "disk_bytes_per_second")
    else:
        rates.doubt_transfers("restore_bytes_per_second")
    return False


def _weighted_quantile(samples: list[tuple[float, float]], quantile: float) -> float:
    """Of (value, weight) pairs; no weight counts for more than a fifth of all, of five or less each the same."""
    weights = sorted((weight for _, weight in samples), reverse=True)
    cap, rest = weights[-1], sum(weights)
    if len(weights) > 5:
        # The largest weights are cut until what is left of each is a fifth of what is left of all.
        for num_cut, largest in enumerate(weights[:5]):
            cap = rest / (5 - num_cut)
            if largest <= cap:
                break
            rest -= largest
    samples = sorted((value, min(weight, cap)) for value, weight in samples)
    # A hair less, so that rounding does not decide between two neighbours.
    rest = quantile * sum(weight for _, weight in samples) * (1 - 1e-9)
    for value, weight in samples:
        rest -= weight
        if rest <= 0:
            return value
    return samples[-1][0]
