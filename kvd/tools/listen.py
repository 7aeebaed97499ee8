"""Sockets to listen on, taken before anything slow happens.

Purpose: a port in use is reported at once, not after a model has been loaded. Invariant: all returned sockets
listen on one and the same port.
"""

from __future__ import annotations

import contextlib
import errno
import socket

from kvd.errors import StartupError

BACKLOG = 512


def open_sockets(host: str, port: int) -> list[socket.socket]:
    """One listening socket per address of `host`; port 0 takes a free one. Raises StartupError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise StartupError(f"host {host}: no such address") from None
    sockets: list[socket.socket] = []
    problems: list[OSError] = []
    for family, _, _, _, address in dict.fromkeys(found):
        chosen_port = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(_open(family, (address[0], chosen_port, *address[2:])))
        except OSError as error:
            problems.append(error)
    # A machine without IPv6 may still resolve localhost to ::1; any other failure counts.
    serious = [problem for problem in problems if problem.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)]
    if serious or not sockets:
        close_all(sockets)
        raise StartupError(_explain(host, port, (serious or problems)[0]))
    return sockets


def close_all(sockets: list[socket.socket]) -> None:
    """Close them; what is closed already stays so."""
    for open_socket in sockets:
        with contextlib.suppress(OSError):
            open_socket.close()


def base_url(host: str, port: int) -> str:
    """The base URL that a client on this machine uses; a wildcard address becomes a loopback one."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/v1"


def _open(family: int, address: tuple[object, ...]) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.setblocking(False)
        opened.bind(address)
        opened.listen(BACKLOG)
    except OSError:
        opened.close()
        raise
    return opened


def _explain(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: end the other program, or choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} needs more rights than this user has: choose one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host {host}: not an address of this machine"
    return f"cannot listen on {host}, port {port}: {error.strerror or error}"
