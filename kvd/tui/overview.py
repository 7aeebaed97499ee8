"""The first page: is it well, how fast is it, what takes the memory, who is served. Owner: the event loop."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Horizontal

from kvd.tui.blocks import BlocksPanel
from kvd.tui.cache import CachePanel
from kvd.tui.page import Jump, Key, Page
from kvd.tui.panel import Panel
from kvd.tui.requests import RequestsPanel
from kvd.tui.throughput import ThroughputPanel

_EXPLAINS: tuple[tuple[str, tuple[Key, ...]], ...] = (
    (
        "KV blocks",
        (
            ("A █ active", "blocks that running requests read and write"),
            ("C ▒ cached", "blocks kept for prompts that begin alike"),
            ("F · free", "blocks that hold nothing"),
            ("RAM, disk", "the tiers below; active in RAM are swapped-out requests"),
        ),
    ),
    (
        "Throughput",
        (
            ("prefill", "prompt tokens computed per second; cached ones cost nothing"),
            ("decode", "tokens generated per second, all requests together"),
            ("TTFT", "time to first token; median and 95th percentile"),
            ("ITL", "time between the tokens of one request"),
            ("queue", "time from arrival to the first step"),
            ("of all", "since start, where the last minute saw nothing"),
            ("step", "tokens of the latest step, of those allowed; its time"),
        ),
    ),
    (
        "Prefix cache",
        (
            ("hit rate", "prompt tokens found in the cache, of those looked up"),
            ("└", "hit tokens from RAM, from disk, and of parts of blocks"),
            ("RAM, pinned", "blocks in the RAM tier; blocks that stay"),
            ("evicted", "cached blocks given up; at the right: in the last minute"),
            ("preempted", "requests put back because no block was free"),
            ("recomputed", "tokens computed a second time after that"),
            ("misses", "the cause that cost most tokens; 2 shows all of them"),
        ),
    ),
    (
        "Requests",
        (
            ("limit", "requests that may run at the same time, as of now"),
            ("state", "waiting, restoring from RAM or disk, prefill with its"),
            ("", "progress, decode; preempted, swapped: back in the queue"),
            ("hit", "share of the prompt that came from the cache"),
            ("output", "tokens generated / max_tokens"),
            ("blks", "KV blocks held"),
            ("pre", "times preempted: r computed again, s kept in RAM"),
            ("age", "since arrival"),
        ),
    ),
)


class OverviewPage(Page):
    """Throughput and latency, the tiers of the KV cache, and the requests."""

    title: ClassVar[str] = "Overview"
    filters: ClassVar[str] = "request id, client, endpoint, state"

    DEFAULT_CSS = """
    OverviewPage #blocks { height: 5; }
    OverviewPage #middle { height: 8; }
    OverviewPage #requests { height: 1fr; min-height: 4; }
    .-low OverviewPage #blocks { height: 3; }
    .-tall OverviewPage #blocks { height: 13; }
    .-tall OverviewPage #middle { height: 14; }
    .-wide OverviewPage #throughput { width: 2fr; }
    .-low OverviewPage #middle { display: none; }
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlocksPanel(id="blocks", classes="box")
        self.throughput = ThroughputPanel(id="throughput", classes="box")
        self.cache = CachePanel(id="cache", classes="box")
        self.requests = RequestsPanel(id="requests", classes="box flush")

    @property
    def panels(self) -> tuple[Panel, ...]:
        return self.blocks, self.throughput, self.cache, self.requests

    @property
    def keys(self) -> tuple[Key, ...]:
        return self.requests.keys

    @property
    def explains(self) -> tuple[tuple[str, tuple[Key, ...]], ...]:
        return _EXPLAINS

    def on_requests_panel_opened(self, message: RequestsPanel.Opened) -> None:
        self.post_message(Jump("Requests", message.request_id))

    def compose(self) -> ComposeResult:
        yield self.blocks
        with Horizontal(id="middle"):
            yield self.throughput
            yield self.cache
        yield self.requests

    def set_filter(self, text: str) -> None:
        super().set_filter(text)
        self.requests.set_filter(text)

    def copied(self) -> str:
        return self.requests.copied()
