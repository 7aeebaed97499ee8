"""Who may talk to the server: Host and Origin against DNS rebinding, keys against everybody else.

Pure decisions on header values; only the keys may change while the server runs. Browsers always send Host, and
Origin with every request that could change something, so a page on a foreign site is refused without any
cooperation of its own.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from http import HTTPStatus
from urllib.parse import urlsplit

from kvd.config_keys import ApiKey
from kvd.errors import RequestError
from kvd.server.keys import KeyRing
from kvd.server.responses import short
from kvd.server.settings import ServerSettings


class Guard:
    """The access rules of one server."""

    def __init__(self, settings: ServerSettings) -> None:
        self.key_ring = KeyRing(settings.api_keys, settings.api_key_file)
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
        return bool(self.key_ring.keys) and _parse_address(name) is not None

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

    def identify(self, authorization: str | None, api_key: str | None) -> ApiKey | None:
        """The key that a request carries; None when no key is needed. Raises a 401."""
        self.key_ring.refresh()
        if not self.key_ring.keys:
            return None
        scheme, _, bearer = (authorization or "").partition(" ")
        candidates = [bearer.strip()] if scheme.lower() == "bearer" else []
        if api_key is not None:
            candidates.append(api_key.strip())
        found = None
        for key in self.key_ring.keys:  # no early exit: the time taken tells nothing about the keys
            for candidate in candidates:
                if hmac.compare_digest(_to_bytes(candidate), _to_bytes(key.key)):
                    found = key
        if found is not None:
            return found
        message = _explain_keys(candidates, authorization)
        raise RequestError(message, status=HTTPStatus.UNAUTHORIZED, kind="authentication_error", code="invalid_api_key")


_KEY_FAULTS = (
    (re.compile(r"bearer(\s|$)", re.IGNORECASE), "has 'Bearer' in front of it twice; give the key alone"),
    (
        re.compile(r"""['"`\u2018\u2019\u201c\u201d]|.*['"`\u2018\u2019\u201c\u201d]$"""),
        "has quotes around it; give it without",
    ),
    (re.compile(r"\$|%\w+%$"), "is the name of a variable that nobody replaced by its value"),
    (re.compile(r".*\s"), "has a blank in it; no key has"),
    (re.compile(r"$"), "is empty"),
)
"""How a key looks that was mangled on its way here, and what to say; no word of it depends on the right key."""


def _explain_keys(candidates: list[str], authorization: str | None) -> str:
    for candidate in candidates:
        for pattern, fault in _KEY_FAULTS:
            if pattern.match(candidate):
                return f"the API key is wrong: it {fault}"
    if candidates:
        return "the API key is wrong"
    if authorization:
        return "an API key is needed, and the Authorization header has none: Authorization: Bearer KEY"
    return "an API key is needed: Authorization: Bearer KEY"


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
