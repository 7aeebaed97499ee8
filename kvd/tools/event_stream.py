"""Server-sent events out of the pieces in which they arrive. No I/O.

Invariant: what is held is bounded, whatever is fed: a line or an event beyond the bound is a ValueError.
"""

from __future__ import annotations


class EventStream:
    """Feed it bytes; it gives the events that they complete, as (name, data). Comments and unknown fields are left out.

    max_bytes: of one line, and of the data of one event.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._num_scanned = 0  # bytes of the buffer that are known to have no line end
        self._name = ""
        self._data: list[bytes] = []
        self._num_data_bytes = 0

    def feed(self, piece: bytes) -> list[tuple[str, bytes]]:
        """The events that end in `piece`, oldest first."""
        buffer = self._buffer
        buffer += piece
        events: list[tuple[str, bytes]] = []
        start = 0
        while (end := buffer.find(b"\n", max(start, self._num_scanned))) >= 0:
            self._take(bytes(memoryview(buffer)[start:end]).removesuffix(b"\r"), events)
            start = end + 1
            self._num_scanned = 0
        del buffer[:start]
        self._num_scanned = len(buffer)
        if len(buffer) > self._max_bytes:
            raise ValueError(f"a line has more than {self._max_bytes:,} bytes")
        return events

    def _take(self, line: bytes, events: list[tuple[str, bytes]]) -> None:
        if not line:
            if self._data:
                events.append((self._name, b"\n".join(self._data)))
            self._name, self._data, self._num_data_bytes = "", [], 0
            return
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field == b"data":
            self._num_data_bytes += len(value) + 1
            if self._num_data_bytes > self._max_bytes:
                raise ValueError(f"an event has more than {self._max_bytes:,} bytes")
            self._data.append(value)
