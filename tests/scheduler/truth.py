"""The model of the simulator: a chain function, and what each request gives when nobody else is there.

Every token's value depends on the salt, on all tokens before it, and on which blocks were forgotten by then. So a value
stands for the bytes of a KV slot: whoever reads another's, or one computed after another drop, is found out. The next
token is a function of the value, so the right output of a request is known beforehand.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvd.core import BLOCK_SIZE, FinishReason, Logprobs, Request
from kvd.scheduler.dropping import DropSchedule

VOCAB_SIZE = 50
STOP_TOKEN = 0
_MASK = (1 << 64) - 1


def root_value(salt: str) -> int:
    return zlib.crc32(salt.encode()) + 1


def next_value(value: int, token_id: int, forgotten: int = 0) -> int:
    value = (value * 6364136223846793005 + token_id * 1442695040888963407 + forgotten + 1) & _MASK
    return value ^ (value >> 29)


def sampled_token(value: int) -> int:
    return (value >> 20) % VOCAB_SIZE


def score_of(value: int, token_id: int) -> Logprobs:
    """How likely `token_id` is behind the token with this value."""
    return Logprobs(-float((value >> 13) % 997), ((token_id, -1.0),))


def fingerprint(dropped: Iterable[int]) -> int:
    """Of the set of forgotten blocks; 0 when there is none."""
    numbers = sorted(dropped)
    return zlib.crc32(repr(numbers).encode()) << 16 | 1 if numbers else 0


def masses_of(values: Sequence[int], first_position: int, numbers: Sequence[int]) -> tuple[float, ...]:
    """Attention mass of each block from the queries at `first_position` on, whose values are given.

    Multiples of 1/16, so that sums do not depend on how the queries are cut into chunks.
    """
    masses = [0] * len(numbers)
    for position, value in enumerate(values, first_position):
        for entry, number in enumerate(numbers):
            if number * BLOCK_SIZE > position:
                break
            masses[entry] += (value * (2 * number + 1) >> 37) & 15
    return tuple([mass / 16 for mass in masses])


@dataclass(slots=True)
class Truth:
    """What a request gives when nobody else is there.

    values     of the token at each position
    forgotten  (position, blocks forgotten so far) from that position on, rising
    """

    request: Request
    token_ids: list[int]
    values: list[int]
    finish_reason: FinishReason
    forgotten: list[tuple[int, frozenset[int]]] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, max_total: int, *, budget_tokens: int) -> Truth:
        """`budget_tokens`: what a request with `kv_eviction` may hold."""
        schedule = None
        if request.kv_eviction != "none":
            schedule = DropSchedule(request.kv_eviction, budget_tokens // BLOCK_SIZE)
        truth = cls(request, list(request.prompt_token_ids), [], "length")
        max_total = min(max_total, len(truth.token_ids) + request.sampling.max_tokens)
        value, held, dropped, mixed = root_value(request.cache_salt), list[int](), frozenset[int](), 0
        position, is_complete = 0, False
        while True:
            if schedule is not None:
                if schedule.is_due(position, held):
                    gone = frozenset(schedule.due(position, held))
                    assert gone <= set(held), "forgets what it does not hold"
                    held = [number for number in held if number not in gone]
                    dropped |= gone
                    mixed = fingerprint(dropped)
                    truth.forgotten.append((position, dropped))
                if position % BLOCK_SIZE == 0:
                    held.append(position // BLOCK_SIZE)
                    assert len(held) * BLOCK_SIZE <= budget_tokens, "holds more than its budget"
            value = next_value(value, truth.token_ids[position], mixed)
            truth.values.append(value)
            position += 1
            if schedule is not None and schedule.wants_mass:
                schedule.accumulate(held, masses_of([value], position - 1, held), position)
            if is_complete:
                return truth
            if position == len(truth.token_ids):
                truth.token_ids.append(sampled_token(value))
                # The last token has a value too: it is computed where a stop is found late.
                is_complete = truth._ends(max_total)

    def _ends(self, max_total: int) -> bool:
        if self.token_ids[-1] in self.request.sampling.stop_token_ids:
            self.finish_reason = "stop"
            return True
        return len(self.token_ids) >= max_total

    @property
    def output(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :]

    def dropped_at(self, position: int) -> frozenset[int]:
        """Blocks that are forgotten when the token at `position` is computed."""
        for first, dropped in reversed(self.forgotten):
            if first <= position:
                return dropped
        return frozenset()
