"""What the fake engine and a scripted doctor say when they are asked beyond a snapshot."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.errors import RequestError
from kvd.insight import BlockMap, DoctorReport, Finding, MapCell, Miss, Reveal, Timeline, TimelineEntry

TIMELINE = Timeline(
    request_id="req-ended",
    client="tests",
    endpoint="chat",
    arrived=1_700_000_000.0,
    num_prompt_tokens=40,
    has_ended=True,
    entries=(
        TimelineEntry(0.0, "queued", 40, "3 requests before it"),
        TimelineEntry(0.5, "hit", 16, "of the KV pool"),
        TimelineEntry(2.0, "finished", 7, "stop"),
    ),
)
MISS = Miss("req-missed", "tests", "chat", 1_700_000_000.0, "volatile_line", 100, 14, 80, 14, 41, "differs at token 14")
ADVICE = "move the date to the end, behind everything that stays the same from one request to the next"
FINDING = Finding("volatile_line", "tests", "chat", 41, 3280, 1.5, 14, "differs at token 14", ADVICE, "req-missed")
COUNTS = (("volatile_line", 41, 3280), ("new", 3, 0))


class InsightOfEngine:
    """The engine's part of `insight.Insight`.

    token_ids: of chains. ended: what is known of requests. num_groups: of the KV pool, of ten blocks each.
    """

    def __init__(self) -> None:
        self.token_ids: dict[str, tuple[int, ...]] = {"ab" * 16: tuple(b"You are helpful.")}
        self.ended: dict[str, Timeline] = {TIMELINE.request_id: TIMELINE}
        self.num_groups = 2
        self.dropped: list[str] = []

    async def block_map(self, max_cells: int, group_id: int = 0) -> BlockMap:
        if group_id >= self.num_groups:
            raise RequestError(f"there are {self.num_groups} groups", param="group")
        num_cells = min(max_cells, 10)
        num_blocks, cell = 10 * num_cells, MapCell(2, 3, 5, 1, 0, 0, 1.5)
        return BlockMap(group_id, self.num_groups, num_blocks, 10, ("tests",), (8 * num_cells,), (cell,) * num_cells)

    async def timeline(self, request_id: str) -> Timeline | None:
        return self.ended.get(request_id)

    async def timelines(self, limit: int) -> tuple[Timeline, ...]:
        return tuple(self.ended.values())[:limit]

    async def chain_tokens(self, chain: str, limit: int) -> tuple[int, ...]:
        return self.token_ids.get(chain, ())[:limit]


class FakeDoctor:
    """A doctor that has one finding."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.answers: list[tuple[str, tuple[int, ...]]] = []

    def report(self, prefill_tokens_per_second: float) -> DoctorReport:
        self.rates.append(prefill_tokens_per_second)
        return DoctorReport((FINDING,), (MISS,), 44, 2, 5000, 1000, 3280, prefill_tokens_per_second, 0.25, COUNTS)

    def reveal(self, request_id: str) -> Reveal | None:
        if request_id != MISS.request_id:
            return None
        return Reveal("the place where it differs", "Today is Monday", "Today is Sunday")

    def answered(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.answers.append((request_id, tuple(token_ids)))

    def counts(self) -> tuple[tuple[str, int, int], ...]:
        return COUNTS
