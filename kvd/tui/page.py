"""What a screen of the dashboard is: panels, what they ask the engine beyond its snapshot, and what they want done.

The app owns the pages, shows one at a time, and does everything that crosses to the engine; a page draws, and posts
`Note` and `Do`. Owner: the event loop. Invariant: a page never holds the console; what it fetched it may show for as
long as it likes, and says how old it is where that matters.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import ClassVar

from textual.containers import Container
from textual.message import Message

from kvd.insight import Console
from kvd.tui.panel import Panel
from kvd.tui.question import Question
from kvd.tui.view import Link, View

Key = tuple[str, str]
"""A key and what it does, in a word or two, for the key line."""


class Note(Message):
    """Say something to the operator, for a few seconds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class Do(Message):
    """Do something to the engine, after a question if there is one; refused where the dashboard only reads.

    act: does it, and returns the line that says what came of it. name: for the line that says that it failed.
    answer: what the question must return for it to be done.
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


class Page(Container):
    """One screen. Subclasses set the class variables and implement `panels`; `compose` yields the same panels."""

    title: ClassVar[str]
    """One word, as the tab line shows it."""
    fetch_seconds: ClassVar[float] = 1.0
    """How often `fetch` is called at most while the page is shown."""

    @property
    @abstractmethod
    def panels(self) -> tuple[Panel, ...]:
        """In the order in which they are repainted, one per frame."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys that only this page has, most important first."""
        return ()

    async def fetch(self, console: Console) -> None:
        """Ask for what only this page shows. Called while it is shown, one call at a time; errors become a note."""

    def open(self, focus: str = "") -> None:
        """The page is shown now; `focus` names what to look at, a request id for instance. Called before `show`."""

    def show(self, view: View | None, link: Link) -> None:
        """Show everything at once, as an answer to a key; the app paints panel by panel otherwise."""
        for panel in self.panels:
            panel.show(view, link)


class Jump(Message):
    """Show another page, at `focus`."""

    def __init__(self, title: str, focus: str = "") -> None:
        super().__init__()
        self.title = title
        self.focus = focus
