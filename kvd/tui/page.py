"""What a screen of the dashboard is: panels, what they ask the engine beyond its snapshot, and what they want done.

The app owns the pages, shows one at a time, and does everything that crosses to the engine; a page draws, and posts
`Note`, `Do`, `Jump` and `Refetch`. Owner: the event loop. Invariant: a page never holds the console; what it fetched it
may show for as long as it likes, and says how old it is where that matters.

How the app treats a page:
- All pages are mounted at the start and one is displayed. When it is shown, `open` is called, then `show`, then its
  first panel that can have the focus gets it; where there is none, the page itself does. Keys are `BINDINGS` of the
  page or of its panels; the app takes `q ? space + - t y R / 1…9 tab`, the table of requests takes the arrows,
  `j k g G r x enter`. An action that has nothing to do raises `textual.actions.SkipAction`, and the app gets the key.
- After a fetch, and after every snapshot, the panels are shown one per frame. A page that has to show at once what
  came of a key calls `redraw` of the panel.
- `escape` clears the filter where no binding of the page took it.
- Style: give a panel with a border the class `box` (`Panel(id=…, classes="box")`), or `box flush` where its lines reach
  from border to border; what else a page needs goes into its `DEFAULT_CSS`, which the style sheet of the app wins
  against. `.-wide` (from 120 columns), `.-tall` (from 40 rows), `.-short` and `.-low` (below 22 rows) are set.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from textual.containers import Container
from textual.message import Message

from kvd.insight import Console
from kvd.tui.panel import Panel
from kvd.tui.question import Question
from kvd.tui.view import Link, View

Key = tuple[str, str]
"""A key and what it does, in a word or two, for the key line and the help."""


class Note(Message):
    """Say something to the operator, for a few seconds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class Do(Message):
    """Do something to the engine, after a question if there is one; refused where the dashboard only reads.

    act: does it, and returns the line that says what came of it, empty for none. name: for the lines that say that it
    failed or is refused ("abort"). answer: what the question must return for it to be done.
    """

    def __init__(
        self,
        name: str,
        act: Callable[[Console], Awaitable[str]],
        *,
        question: Question | None = None,
        answer: str = "yes",
        only_reads: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.act = act
        self.question = question
        self.answer = answer
        self.only_reads = only_reads


class Jump(Message):
    """Show another page, at `focus`."""

    def __init__(self, title: str, focus: str = "") -> None:
        super().__init__()
        self.title = title
        self.focus = focus


class Refetch(Message):
    """What the page wants to fetch has changed: end a fetch that goes on, and begin one at once."""


class Page(Container, can_focus=True):
    """One screen. Subclasses set the class variables and implement `panels`; `compose` yields the same panels."""

    title: ClassVar[str]
    """One word, as the tab line shows it."""
    fetch_seconds: ClassVar[float] = 1.0
    """How often `fetch` is called at most while the page is shown."""
    filters: ClassVar[str] = ""
    """What the filter looks at, in words; empty: the page has none."""

    filter_text = ""
    """What the operator has typed into the filter."""

    def __init_subclass__(cls, **options: Any) -> None:
        # So that `DEFAULT_CSS` may speak of the size classes of the screen; Textual asks each class for itself.
        cls.SCOPED_CSS = False
        super().__init_subclass__(**options)

    @property
    @abstractmethod
    def panels(self) -> tuple[Panel, ...]:
        """In the order in which they are repainted, one per frame."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys that only this page has, most important first."""
        return ()

    @property
    def explains(self) -> tuple[tuple[str, tuple[Key, ...]], ...]:
        """For the help: title of a panel, and what its figures mean, one line of at most 60 characters each."""
        return ()

    async def fetch(self, console: Console) -> None:
        """Ask for what only this page shows. Called while it is shown, one call at a time; errors become a note."""

    def open(self, focus: str = "") -> None:
        """The page is shown now; `focus` names what to look at, a request id for instance. Called before `show`."""

    def show(self, view: View | None, link: Link) -> None:
        """Show everything at once, as an answer to a key; the app paints panel by panel otherwise."""
        for panel in self.panels:
            panel.show(view, link)

    def set_filter(self, text: str) -> None:
        """Show only what matches; called with every key typed. The page repaints what changes."""
        self.filter_text = text

    def copied(self) -> str:
        """What `y` copies: the selected thing's name; empty: the address of the server."""
        return ""
