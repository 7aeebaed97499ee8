"""Who may talk to the server: Host and Origin against DNS rebinding, keys against everybody else.

Pure decisions on header values; immutable after construction. Browsers always send Host, and Origin with
every request that could change something, so a page on a foreign site is refused without any cooperation of
its own.
"""

from __future__ import annotations

import hmac
import ipaddress
from http import HTTPStatus
from urllib.parse import urlsplit

from kvd.errors import RequestError
from kvd.server.responses import short
from kvd.server.settings import ServerSettings


class Guard:
    """The access rules of one server."""

    def __init__(self, settings: ServerSettings) -> None:
        self._keys = tuple((name, _to_bytes(key)) for name, key in settings.api_keys)
        self._hosts = {_normalize_host(name) for name in (settings.host, *settings.allowed_hosts)}
        self._origins = {origin.rstrip("/").lower() for origin in settings.allowed_origins}

    def check_host(self, host: str | None) -> None:
        """Raise a 403 unless the Host header names this server. Clients without one are no browsers."""
        if host is None or self._is_own_host(_normalize_host(host)):
            return
        raise _forbidden(f"Host '{short(host)}' is not one of this server's names (setting allowed_hosts)")

    def _is_own_host(self, name: str) -> bool:
        if name in self._hosts or "*" in self._hosts or _is_loopback(name):
            return True
        return bool(self._keys) and _parse_address(name) is not None

    def check_origin(self, origin: str | None, host: str | None) -> None:
        """Raise a 403 for a browser page that is neither local, nor allowed, nor served from this very
        host.
        """
        if origin is None:
            return
        parts = _split_origin(origin)
        if "*" in self._origins or origin.lower() in self._origins:
            return
        if parts is not None:
            authority, name = parts
            if _is_loopback(name) or (host is not None and authority == host.lower()):
                return
        raise _forbidden(f"Origin '{short(origin)}' may not call this server (setting allowed_origins)")

    def identify(self, authorization: str | None, api_key: str | None) -> str | None:
        """The name of the key that a request carries; None when no key is needed. Raises a 401."""
        if not self._keys:
            return None
        scheme, _, bearer = (authorization or "").partition(" ")
        candidates = [_to_bytes(bearer.strip())] if scheme.lower() == "bearer" else []
        if api_key is not None:
            candidates.append(_to_bytes(api_key.strip()))
        found = None
        for name, key in self._keys:  # no early exit: the time taken tells nothing about the keys
            for candidate in candidates:
                if hmac.compare_digest(candidate, key):
                    found = name
        if found is not None:
            return found
        message = "the API key is wrong" if candidates else "an API key is needed: Authorization: Bearer KEY"
        raise RequestError(message, status=HTTPStatus.UNAUTHORIZED, kind="authentication_error", code="invalid_api_key")


def _forbidden(message: str) -> RequestError:
    return RequestError(message, status=HTTPStatus.FORBIDDEN, kind="permission_error")


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _normalize_host(host: str) -> str:
    """The name in `name`, `name:port`, `[v6]:port` or a bare v6 address, in lower case."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    if name.count(":") == 1:
        name = name.partition(":")[0]
    return name.rstrip(".")


def _split_origin(origin: str) -> tuple[str, str] | None:
    """(authority, host name) of an http origin; None for anything else, `null` included."""
    try:
        parts = urlsplit(origin.lower())
        name = parts.hostname
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or name is None or parts.path not in ("", "/"):
        return None
    return parts.netloc, name


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _parse_address(name)
    return address is not None and address.is_loopback


def _parse_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
