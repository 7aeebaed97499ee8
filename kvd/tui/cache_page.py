"""The second page: where the blocks are, which prefixes are worth most, what left and why, and why prompts missed.

Owner: the event loop. Where the terminal is too low for all of it, one of the three lists is shown below the map, and a
key goes through them. Invariant: what cannot be seen is not fetched.
"""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal

from kvd.insight import Console
from kvd.tui.block_map import MODES, BlockMapPanel
from kvd.tui.doctor_panel import DoctorPanel
from kvd.tui.eviction_panel import EvictionPanel
from kvd.tui.page import Key, Page, Refetch
from kvd.tui.panel import Panel
from kvd.tui.prefix_panel import LIMIT, PrefixPanel

_LISTS = ("prefixes", "doctor", "evictions")

_EXPLAINS: tuple[tuple[str, tuple[Key, ...]], ...] = (
    (
        "Block map",
        (
            ("by owner", "the letter of the client that computed most of the cell;"),
            ("", "capital: some of its blocks are in use, small: only cached"),
            ("by sharing", "· free  ░ cached  ▓ active  █ used by several  ◆ pinned"),
            ("by age", "how long ago the cached blocks of the cell were used"),
        ),
    ),
    (
        "Top prefixes",
        (
            ("tokens", "length of the chain of blocks from its first token"),
            ("hits", "how often a prompt was found to begin with it"),
            ("pool", "the share of the pool that it takes"),
            ("age, idle", "since it was computed, since it was used last"),
        ),
    ),
    (
        "Evictions and tiers",
        (
            ("capacity, cap", "a request needed the room; max_cached_tokens was reached"),
            ("lifetime", "of evicted blocks, from being filled to their end"),
            ("unused", "of evicted blocks, since they were used last"),
            ("found after", "of blocks found again, since they were used last"),
        ),
    ),
    (
        "Prefix doctor",
        (
            ("lost", "tokens that equal earlier ones and were computed again"),
            ("saves", "time to first token, of all of them, at the measured speed"),
            ("→", "what to change so that they are found"),
        ),
    ),
)


class CachePage(Page):
    """Map and evictions above, prefixes and doctor below."""

    title: ClassVar[str] = "Cache"
    fetch_seconds: ClassVar[float] = 1.0
    filters: ClassVar[str] = "client, prefix id, cause"

    SCOPED_CSS = False  # the classes of the screen say how much room there is
    DEFAULT_CSS = """
    CachePage #cache-top { height: 8; layout: horizontal; }
    CachePage #cache-map { width: 1fr; height: 1fr; }
    CachePage #cache-evictions { width: 62; display: none; }
    CachePage #cache-prefixes, CachePage #cache-doctor { height: 1fr; display: none; padding: 0; }
    CachePage.-prefixes #cache-prefixes, CachePage.-doctor #cache-doctor { display: block; }
    .-low CachePage #cache-top { height: 6; }
    CachePage.-evictions #cache-top { height: 1fr; layout: vertical; }
    CachePage.-evictions #cache-evictions { display: block; width: 1fr; height: 11; }
    .-low CachePage #cache-evictions { height: 1fr; }
    .-tall CachePage #cache-top { height: 24; layout: vertical; }
    .-tall CachePage #cache-evictions { display: block; width: 1fr; height: 13; }
    .-tall CachePage #cache-prefixes, .-tall CachePage #cache-doctor { display: block; }
    .-wide CachePage #cache-top { height: 12; layout: horizontal; }
    .-wide CachePage #cache-evictions { display: block; width: 62; height: 1fr; }
    .-wide CachePage.-evictions #cache-prefixes { display: block; }
    .-wide.-tall CachePage #cache-top { height: 16; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "turn_map", show=False),
        Binding("n", "next_list", show=False),
        Binding("l", "next_group", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.block_map = BlockMapPanel(id="cache-map")
        self.evictions = EvictionPanel(id="cache-evictions", classes="box")
        self.prefixes = PrefixPanel(id="cache-prefixes")
        self.doctor = DoctorPanel(id="cache-doctor")
        self._list = _LISTS[0]
        self.add_class(f"-{self._list}")

    @property
    def panels(self) -> tuple[Panel, ...]:
        # The first that can have the focus gets it when the page is shown.
        shown = self._shown_panel
        others = (panel for panel in (self.evictions, self.prefixes, self.doctor) if panel is not shown)
        return self.block_map, shown, *others

    @property
    def keys(self) -> tuple[Key, ...]:
        following = MODES[(MODES.index(self.block_map.mode) + 1) % len(MODES)]
        keys: list[Key] = [("n", self._next_list), ("m", f"map by {following}")]
        if self.block_map.num_groups > 1:
            keys.append(("l", "layer group"))
        if self._shown == "prefixes":
            keys += [("p", "pin"), ("d", "drop"), ("v", "reveal"), ("←→", "sort"), ("r", "reverse")]
        elif self._shown == "doctor":
            keys += [("enter", "explain"), ("v", "reveal")]
        return (*keys, ("R", "reset cache"))

    @property
    def explains(self) -> tuple[tuple[str, tuple[Key, ...]], ...]:
        return _EXPLAINS

    def compose(self) -> ComposeResult:
        with Horizontal(id="cache-top"):
            yield self.block_map
            yield self.evictions
        yield self.prefixes
        yield self.doctor

    # ------------------------------------------------------------------ what is shown

    @property
    def _lists(self) -> tuple[str, ...]:
        """What the key goes through: the evictions have their own place where the terminal is wide or tall."""
        has_room = self.screen.has_class("-wide") or self.screen.has_class("-tall")
        return _LISTS[:2] if has_room else _LISTS

    @property
    def _shown(self) -> str:
        return self._list if self._list in self._lists else self._lists[0]

    @property
    def _shown_panel(self) -> Panel:
        return {"prefixes": self.prefixes, "doctor": self.doctor, "evictions": self.evictions}[self._shown]

    @property
    def _next_list(self) -> str:
        return self._lists[(self._lists.index(self._shown) + 1) % len(self._lists)]

    def _can_be_seen(self, name: str) -> bool:
        return name == self._shown or self.screen.has_class("-tall")

    def action_next_list(self) -> None:
        self.remove_class(f"-{self._list}")
        self._list = self._next_list
        self.add_class(f"-{self._list}")
        self.screen.set_focus(self._shown_panel, scroll_visible=False)
        self.post_message(Refetch())

    def action_turn_map(self) -> None:
        self.block_map.turn()
        self.post_message(Refetch())

    def action_next_group(self) -> None:
        if self.block_map.num_groups > 1:
            self.block_map.next_group()
            self.post_message(Refetch())

    def set_filter(self, text: str) -> None:
        super().set_filter(text)
        self.prefixes.set_filter(text)
        self.doctor.set_filter(text)

    def copied(self) -> str:
        if self._shown == "doctor":
            return "" if self.doctor.selected is None else self.doctor.selected.example_id
        return "" if self.prefixes.selected is None else self.prefixes.selected.prefix_id

    # ------------------------------------------------------------------ fetching

    async def fetch(self, console: Console) -> None:
        """Everything that can be seen; what cannot be had leaves the other panels as they are."""
        problem: Exception | None = None
        for panel, part in (
            (self.block_map, self._fetch_map),
            (self.prefixes, self._fetch_prefixes),
            (self.doctor, self._fetch_report),
        ):
            try:
                await part(console)
                panel.problem = ""
            except Exception as error:  # whatever a console raises is for the operator to read
                panel.problem = str(error) or type(error).__name__
                problem = problem or error
        if problem is not None:
            raise problem

    async def _fetch_map(self, console: Console) -> None:
        num_cells = self.block_map.num_cells
        if num_cells:
            self.block_map.put(await console.block_map(num_cells, self.block_map.group_id))

    async def _fetch_prefixes(self, console: Console) -> None:
        if self._can_be_seen("prefixes"):
            self.prefixes.put(await console.prefixes(LIMIT))

    async def _fetch_report(self, console: Console) -> None:
        if self._can_be_seen("doctor"):
            self.doctor.put(await console.doctor())
