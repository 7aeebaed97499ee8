"""What the doctor has found so far: counts by cause, misses of one kind put together, and what may be revealed of them.

Owner: `Doctor`, behind its lock. Bounded: of the kinds, those that lost the least go first; their tokens stay in the
counts by cause.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from kvd.insight import Admission, Finding, Miss, MissCause
from kvd.observe.doctor_causes import Diagnosis
from kvd.observe.doctor_words import ADVICE, CAUSES, finding_words, miss_words

MAX_KINDS = 256
MAX_RECENT = 200
_MAX_POSITIONS = 64

Kind = tuple[MissCause, str, str, int]


@dataclass(frozen=True, slots=True)
class Evidence:
    """A miss, and tokens of ours and theirs around the place."""

    miss: Miss
    ours: bytes
    theirs: bytes


@dataclass(slots=True)
class _Group:
    """Misses of one kind. `example`: the one that lost the most."""

    example: Evidence
    num_requests: int = 0
    lost_tokens: int = 0
    num_alike: int = 0
    positions: Counter[int] = field(default_factory=Counter)

    @property
    def position(self) -> int:
        return self.positions.most_common(1)[0][0]


class Findings:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.num_examined = 0
        self._counts: dict[MissCause, list[int]] = {cause: [0, 0] for cause in CAUSES}
        self._groups: dict[Kind, _Group] = {}
        self._recent: deque[Evidence] = deque(maxlen=MAX_RECENT)

    def count(self, admission: Admission) -> None:
        """A prompt was examined that may use the cache."""
        self.prompt_tokens += len(admission.prompt_token_ids)
        self.cached_tokens += admission.num_cached_tokens

    def add(self, admission: Admission, diagnosis: Diagnosis, time: float) -> None:
        """A miss, at a time in unix seconds."""
        cause = diagnosis.cause
        counts = self._counts[cause]
        counts[0] += 1
        counts[1] += diagnosis.lost_tokens
        if cause == "new":
            return
        miss = Miss(
            admission.request_id,
            admission.client,
            admission.endpoint,
            time,
            cause,
            len(admission.prompt_token_ids),
            admission.num_cached_tokens,
            diagnosis.lost_tokens,
            diagnosis.position,
            diagnosis.num_alike,
            miss_words(diagnosis, admission),
        )
        evidence = Evidence(miss, diagnosis.ours, diagnosis.theirs)
        self._recent.append(evidence)
        kind = (cause, miss.client, miss.endpoint, diagnosis.place)
        group = self._groups.get(kind)
        if group is None:
            self._make_room()
            group = self._groups[kind] = _Group(evidence)
        if miss.lost_tokens >= group.example.miss.lost_tokens:
            group.example = evidence
        group.num_requests += 1
        group.lost_tokens += miss.lost_tokens
        group.num_alike = max(group.num_alike, miss.num_alike)
        if miss.position in group.positions or len(group.positions) < _MAX_POSITIONS:
            group.positions[miss.position] += 1

    def _make_room(self) -> None:
        if len(self._groups) >= MAX_KINDS:
            del self._groups[min(self._groups, key=lambda kind: self._groups[kind].lost_tokens)]

    @property
    def lost_tokens(self) -> int:
        return sum(lost for _, lost in self._counts.values())

    def by_cause(self) -> tuple[tuple[str, int, int], ...]:
        """(cause, requests, lost tokens) of every cause, in a fixed order."""
        return tuple((cause, requests, lost) for cause, (requests, lost) in self._counts.items())

    def ranked(self, prefill_tokens_per_second: float) -> tuple[Finding, ...]:
        """The kinds by lost tokens."""
        rate = prefill_tokens_per_second
        found = []
        for (cause, client, endpoint, _), group in self._groups.items():
            lost, position = group.lost_tokens, group.position
            words = finding_words(cause, group.num_requests, lost, position, group.num_alike)
            if group.num_requests == 1:
                words = group.example.miss.words
            seconds = lost / rate if rate > 0 else 0.0
            example_id = group.example.miss.request_id
            found.append(
                Finding(
                    cause,
                    client,
                    endpoint,
                    group.num_requests,
                    lost,
                    seconds,
                    position,
                    words,
                    ADVICE[cause],
                    example_id,
                )
            )
        return tuple(sorted(found, key=lambda finding: finding.lost_tokens, reverse=True))

    def recent(self) -> tuple[Miss, ...]:
        """The newest first."""
        return tuple(evidence.miss for evidence in reversed(self._recent))

    def evidence(self, request_id: str) -> Evidence | None:
        """Of one of the recent misses, or of the example of a kind."""
        examples = (group.example for group in self._groups.values())
        known = (*reversed(self._recent), *examples)
        return next((evidence for evidence in known if evidence.miss.request_id == request_id), None)
