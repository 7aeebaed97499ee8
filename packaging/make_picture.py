"""Takes the README's picture: the real dashboard, over the real server, while real clients are answered.

Run by hand (`make picture`); it takes about two minutes, since the clients talk to the default model.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import aiohttp

from kvd.config_load import load_config
from kvd.openmp import bound_spinning
from kvd.server.app import build_app
from kvd.server.lifecycle import serve
from kvd.tools.serve import load
from kvd.tui.app import Dashboard

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "dashboard.svg"
SIZE = (112, 28)
NUM_BLOCKS = 240  # a small pool, so that there is something to see in it
SECONDS = 75
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


async def talk(session: aiohttp.ClientSession, url: str, name: str, question: str) -> None:
    """One client that asks again and again, with the same beginning."""
    for number in itertools.count():
        body = {
            "messages": [
                {"role": "system", "content": HANDBOOK * 3},
                {"role": "user", "content": f"{question} ({number})"},
            ],
            "max_tokens": 90,
            "stream": True,
        }
        async with session.post(f"{url}/v1/chat/completions", json=body, headers={"User-Agent": name}) as response:
            await response.read()


async def main() -> None:
    config = replace(load_config().config, num_gpu_blocks_override=NUM_BLOCKS, max_model_len=2048)
    engine, text, settings = load(config)
    await engine.start()
    server = await serve(build_app(engine, text, config=settings), "127.0.0.1", 0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        clients = [
            asyncio.create_task(talk(session, server.url, name, question))
            for name, question in [*CLIENTS.items(), *CLIENTS.items()]
        ]
        dashboard = Dashboard(
            engine, engine, address="http://127.0.0.1:8000", model=settings.served_names[0], on_quit="ask"
        )
        async with dashboard.run_test(size=SIZE):
            await asyncio.sleep(SECONDS)
            dashboard.save_picture(PICTURE)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    server.begin_drain()
    await engine.stop(1)
    await server.close()
    print(f"wrote {PICTURE.name}")


if __name__ == "__main__":
    bound_spinning()
    asyncio.run(main())
