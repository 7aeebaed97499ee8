"""The event log: the last few hundred things worth telling a person, with their reasons.

Any thread may add, read or subscribe. Invariant: at most `capacity` events are kept, oldest dropped first,
and a subscriber sees every event added after it subscribed, once, in the order in which they were added.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from kvd.views import LogEvent

Subscriber = Callable[[LogEvent], None]

_LOGGER = logging.getLogger(__name__)


class EventLog:
    """A bounded ring of `LogEvent`s with subscribers."""

    def __init__(self, capacity: int = 1000) -> None:
        assert capacity > 0
        self._events: deque[LogEvent] = deque(maxlen=capacity)
        self._subscribers: dict[int, Subscriber] = {}
        self._next_subscriber = 0
        self._lock = threading.RLock()  # reentrant: a subscriber may add an event or unsubscribe

    def add(
        self,
        level: Literal["debug", "info", "warning", "error"],
        kind: str,
        message: str,
        request_id: str | None = None,
    ) -> LogEvent:
        """Record an event that happens now."""
        event = LogEvent(time.time(), level, kind, message, request_id)
        self.append(event)
        return event

    def append(self, event: LogEvent) -> None:
        """Record an event and hand it to every subscriber, in the calling thread."""
        with self._lock:
            self._events.append(event)
            for number, subscriber in list(self._subscribers.items()):
                try:
                    subscriber(event)
                except Exception:  # whoever adds an event has nothing to do with it, and may be the engine
                    self._subscribers.pop(number, None)
                    _LOGGER.exception("a reader of the event log failed, and is told no more")

    def recent(self, limit: int | None = None) -> tuple[LogEvent, ...]:
        """The newest `limit` events (all that are kept, when None), oldest first."""
        with self._lock:
            events = tuple(self._events)
        if limit is None:
            return events
        return events[-limit:] if limit > 0 else ()

    def subscribe(self, subscriber: Subscriber, *, recent: int = 0) -> Callable[[], None]:
        """Call `subscriber` for the newest `recent` events, then for every one from now on, with none left out between.

        The returned function ends that and may be called twice.

        The subscriber runs in the thread that adds the event, so it must be quick; one that belongs to an event loop
        passes the event on with `call_soon_threadsafe`. If it raises, it is told no more.
        """
        with self._lock:
            number = self._next_subscriber
            self._next_subscriber += 1
            for event in self.recent(recent):
                subscriber(event)
            self._subscribers[number] = subscriber

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers.pop(number, None)

        return unsubscribe
