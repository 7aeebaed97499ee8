"""When which request has waited or run too long.

Owner: the engine thread, through `Scheduler`. Holds ids and arrival numbers, not requests: an alarm that lies an
hour ahead must not keep a request's tokens in memory after it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush


class Alarms:
    """A queue of deadlines, earliest first. An alarm is not taken back; whoever hears it looks whether it matters."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool, str]] = []

    def __bool__(self) -> bool:
        return bool(self._heap)

    def set(self, time: float, arrival_number: int, request_id: str, *, only_in_queue: bool) -> None:
        heappush(self._heap, (time, arrival_number, only_in_queue, request_id))

    def due(self, now: float) -> Iterator[tuple[int, str, bool]]:
        """Arrival number, request id and `only_in_queue` of every alarm up to `now`; each is given once."""
        while self._heap and self._heap[0][0] <= now:
            _, arrival_number, only_in_queue, request_id = heappop(self._heap)
            yield arrival_number, request_id, only_in_queue
