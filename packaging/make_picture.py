"""Takes the pictures of README and docs: the real dashboard, over the real server, while real clients are answered.

    python packaging/make_picture.py [PAGE ...]

Without a page, all that have a picture (`make picture`). It takes about two minutes, since the clients talk to the
default model.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import aiohttp

from kvd.config import Config
from kvd.config_kinds import DiskCache
from kvd.config_load import load_config
from kvd.observe.doctor import Doctor
from kvd.observe.event_log import EventLog
from kvd.openmp import bound_spinning
from kvd.server.app import build_app
from kvd.server.lifecycle import serve
from kvd.server.state import STATE
from kvd.tools.serve import build, open_model, server_settings
from kvd.tui.app import Dashboard
from kvd.tui.page import Page
from kvd.tui.panel import Panel

DOCS = Path(__file__).resolve().parent.parent / "docs"
SIZE = (112, 32)
NUM_BLOCKS = 240  # a small pool, so that there is something to see in it
SECONDS = 75

PICTURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "Overview": ("dashboard.svg", ()),
    "Cache": ("dashboard-cache.svg", ("n",)),
    "Requests": ("dashboard-requests.svg", ("enter",)),
    "What-if": ("dashboard-what-if.svg", ()),
}
"""Page → its picture, and the keys that are pressed before it is taken."""

HANDBOOK = (
    "You are the assistant of a small observatory. The dome opens at dusk. The mirror is two metres wide and must "
    "never be touched. Visitors may look through the finder after nine. Rain closes the dome, and so does wind "
    "above forty kilometres an hour. Every observation is written into the log with its time and its observer. "
)
CLIENTS = {
    "chat-ui/1.4": "Explain to a visitor what the finder is for.",
    "coding-agent/0.9": "Write a function that decides whether the dome may open.",
    "rag-service/2.0": "When does the dome close? Quote the handbook.",
    "autocomplete/1.1": "The mirror must never be",
}
DATED_CLIENT = "rag-service/2.0"
"""Begins each prompt with the time, so that the doctor has something to say."""


async def talk(session: aiohttp.ClientSession, url: str, model: str, name: str, question: str) -> None:
    """One client that asks again and again, with the same beginning."""
    for number in itertools.count():
        system = HANDBOOK * 3
        if name == DATED_CLIENT:
            system = f"It is {time.strftime('%Y-%m-%d %H:%M:%S')}, request {number}.\n{system}"
        body = {
            "model": model,
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": f"{question} ({number})"},
            ],
            "max_tokens": 90,
            "stream": True,
        }
        async with session.post(f"{url}/v1/chat/completions", json=body, headers={"User-Agent": name}) as response:
            await response.read()


async def take(dashboard: Dashboard, pages: Sequence[str]) -> None:
    """Take the pictures of these pages, one after the other."""
    async with dashboard.run_test(size=SIZE) as pilot:
        await asyncio.sleep(SECONDS)
        for title in pages:
            name, keys = PICTURES[title]
            page = next(page for page in dashboard.pages if page.title == title)
            await pilot.press(str(dashboard.pages.index(page) + 1))
            await fetched(dashboard, page)
            await pilot.press(*keys)
            await fetched(dashboard, page)
            while any(panel.is_painting for panel in dashboard.query(Panel)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            dashboard.save_picture(DOCS / name)
            print(f"wrote {name}")


async def fetched(dashboard: Dashboard, page: Page) -> None:
    """Until the page has asked for what it shows, if it does."""
    before = dashboard.num_fetches
    while type(page).fetch is not Page.fetch and dashboard.num_fetches < before + 2:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def show(config: Config, pages: Sequence[str]) -> None:
    """Serve, let the clients talk, and take the pictures."""
    model = open_model(config)
    with closing(Doctor(model.text.decode)) as doctor:
        events = EventLog()
        engine = build(config, model, on_admission=doctor.admitted)
        settings = server_settings(config, engine.info, model.files)
        app = build_app(engine, model.text, config=settings, event_log=events, doctor=doctor)
        await engine.start()
        server = await serve(app, "127.0.0.1", 0)
        served = settings.served_names[0]
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            clients = [
                asyncio.create_task(talk(session, server.url, served, name, question))
                for name, question in [*CLIENTS.items(), *CLIENTS.items()]
            ]
            dashboard = Dashboard(app[STATE].console, address="http://127.0.0.1:8000", model=served, on_quit="ask")
            await take(dashboard, pages)
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        server.begin_drain()
        await engine.stop(1)
        await server.close()


def main(words: Sequence[str]) -> int:
    """The exit code."""
    unknown = [page for page in words if page not in PICTURES]
    if unknown:
        print(f"there is no picture of {unknown[0]}; there are {', '.join(PICTURES)}", file=sys.stderr)
        return 2
    bound_spinning()
    with tempfile.TemporaryDirectory() as folder:
        config = replace(
            load_config().config,
            num_gpu_blocks_override=NUM_BLOCKS,
            max_model_len=2048,
            swap_space=0.05,
            disk_cache=DiskCache(folder, 200 << 20),
        )
        asyncio.run(show(config, words or list(PICTURES)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
