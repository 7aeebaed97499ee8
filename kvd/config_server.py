"""The settings of the HTTP server and of the process around the engine; `Config` adds those of the engine.

Purpose, owner and invariant are those of `config`; a file of its own keeps both readable. Needs the standard library
alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvd.config_fields import setting
from kvd.config_keys import ApiKey, ApiKeys
from kvd.config_kinds import Boolean, Choice, Integer, Size, Text, TextList


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What can be set of server, dashboard and log."""

    host: str = setting(
        "127.0.0.1",
        Text("a host name or an address"),
        "Server",
        "Address to listen on. Any but a loopback address needs a key or insecure.",
    )
    port: int = setting(8000, Integer(0, 65535), "Server", "Port to listen on; 0 takes a free one.")
    api_key: tuple[ApiKey, ...] = setting(
        (),
        ApiKeys(),
        "Server",
        "Key, keys, or names with keys, of which a client must send one. A name shows in the dashboard.",
        null_means="no key is needed",
        environment="KVD_API_KEY",
        secret=True,
    )
    api_key_file: str | None = setting(
        None,
        Text("a file", is_path=True),
        "Server",
        "A YAML file with further keys, `name: KEY` each or with limits of its own; read again when it changes.",
        null_means="none",
        origin="kvd",
    )
    insecure: bool = setting(
        False,
        Boolean(),
        "Server",
        "Allow a host that other machines reach without any key.",
        origin="kvd",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        TextList("a host name or a list of them", commas=True),
        "Server",
        "Further Host headers to accept; loopback names and the bound host always are.",
        null_means="none",
        origin="kvd",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        TextList("an origin such as https://chat.example.org, or a list of them", commas=True),
        "Server",
        "Web pages' origins that may call the server from a browser; localhost always may, * is everybody.",
        null_means="none",
    )
    max_body_size: int = setting(64 * 2**20, Size(1024), "Server", "Largest body of a request.", origin="kvd")
    max_body_bytes_in_flight: int = setting(
        512 * 2**20,
        Size(2**20),
        "Server",
        "Most bytes of bodies of all requests that are being answered; a body beyond that is refused with 503.",
        origin="kvd",
    )
    show_prompts: bool = setting(
        False,
        Boolean(),
        "Server",
        "Hand prompt text out at /kvd/reveal, to whoever has a key; the dashboard of this process always can.",
        origin="kvd",
    )
    dashboard: bool | None = setting(
        None,
        Boolean(has_auto=True),
        "Server",
        "Show the dashboard in the terminal; auto does where there is one, and logs to stderr elsewhere.",
        origin="kvd",
    )
    log_level: str = setting(
        "info",
        Choice(("debug", "info", "warning", "error"), {"warn": "warning"}),
        "Server",
        "Least important messages to log.",
        origin="kvd",
    )
    home: str = setting(
        "~/.cache/kvd",
        Text("a directory"),
        "Server",
        "Where downloads, prepared models, saved sessions and crash logs live.",
        origin="kvd",
        environment="KVD_HOME",
    )

    @property
    def home_path(self) -> Path:
        """`home` with a leading `~` expanded, absolute."""
        return Path(os.path.expanduser(self.home)).absolute()
