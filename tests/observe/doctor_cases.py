"""Prompts whose cause of missing is known since they were made for it, and an engine that knows what it would reuse."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvd.insight import Admission, EvictedNote
from kvd.observe.doctor import Doctor
from kvd.observe.doctor_passages import PASSAGE_TOKENS

SPECIAL, NEW_LINE, SPACE, TAB = 0, 1, 2, 3
TEXTS = {SPECIAL: "", NEW_LINE: "\n", SPACE: " ", TAB: "\t"}
FIRST_WORD = 100_000_000
ENDPOINT = "/v1/chat/completions"
WAIT_SECONDS = 60.0


def decode(token_ids: Sequence[int]) -> str:
    """Words of one length each, so that none is the beginning of another."""
    return "".join(TEXTS.get(id_, f"w{id_} ") for id_ in token_ids)


def words(generator: random.Random, length: int) -> list[int]:
    """Tokens that come nowhere else, but for a chance that no test will see."""
    return [generator.randrange(FIRST_WORD, 10 * FIRST_WORD) for _ in range(length)]


def text(generator: random.Random, length: int) -> list[int]:
    """Words in lines of eight to twenty; the last token ends a line."""
    ids = words(generator, length)
    at = 0
    while (at := at + generator.randint(8, 20)) < length:
        ids[at] = NEW_LINE
    ids[-1] = NEW_LINE
    return ids


def joined(parts: Iterable[Sequence[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(ours), len(theirs)))


def repeated(prompt: Sequence[int], earlier: Iterable[Sequence[int]], cached: int) -> int:
    """Lost tokens by their definition: behind the cached ones, but for the last, in a passage that was there before."""
    length = PASSAGE_TOKENS
    known = {tuple(other[at : at + length]) for other in earlier for at in range(len(other) - length + 1)}
    found: set[int] = set()
    for at in range(len(prompt) - length + 1):
        if tuple(prompt[at : at + length]) in known:
            found.update(range(at, at + length))
    return sum(cached <= at < len(prompt) - 1 for at in found)


@dataclass
class Clinic:
    """A doctor, and a cache that never drops anything, tells it whom it admits and what it would have reused."""

    doctor: Doctor
    cached: dict[str, list[list[int]]] = field(default_factory=dict)
    num_requests: int = 0

    def admit(
        self,
        prompt: Sequence[int],
        *,
        salt: str = "",
        client: str = "ann",
        answer: Sequence[int] = (),
        num_cached: int | None = None,
        excused: str = "",
        evicted: EvictedNote | None = None,
        other_format: str = "",
    ) -> str:
        """Admit a request, and its answer if there is one; its id. num_cached: what is reused, unless it is all."""
        self.num_requests += 1
        request_id = f"request-{self.num_requests}"
        known = self.cached.setdefault(salt, [])
        if num_cached is None:
            num_cached = min(len(prompt) - 1, max((common(prompt, other) for other in known), default=0))
        admission = Admission(
            request_id, client, ENDPOINT, salt, float(self.num_requests), tuple(prompt), num_cached, excused, evicted,
            other_format,
        )  # fmt: skip
        self.doctor.admitted([admission])
        if answer:
            self.doctor.answered(request_id, answer)
        known.append([*prompt, *answer[:-1]])  # the last token was never computed
        return request_id

    def wait(self) -> None:
        assert self.doctor.wait(WAIT_SECONDS)
