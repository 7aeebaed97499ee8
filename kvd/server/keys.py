"""The keys that a server accepts: those of its settings, and those of a file that may change while it runs.

Event loop only. Invariants: a file that cannot be read or is wrong anywhere changes nothing and is one line in the
log per state of the file; a key that left the file is refused from the next request on.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvd.config_keys import NO_LIMITS, ApiKey, KeyLimits, check_keys, read_key_file
from kvd.errors import ConfigError

CHECK_SECONDS = 1.0
"""How often a request may make the server look whether the file has changed."""

logger = logging.getLogger("kvd.server")

_FileState = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks. `salt` keeps the cached prefixes of a key apart from everybody else's; empty: shared."""

    name: str
    limits: KeyLimits = NO_LIMITS
    salt: str = ""

    @classmethod
    def of_key(cls, key: ApiKey) -> Client:
        """The client behind a key. Its salt outlives restarts, and nobody without the key can ask for it."""
        salt = ""
        if key.limits.isolate_cache:
            salt = hashlib.blake2b(key.key.encode(), digest_size=16, person=b"kvd cache salt").hexdigest()
        return cls(key.name, key.limits, salt)


class KeyRing:
    """All keys that are valid now. Raises ConfigError at construction where the file is wrong."""

    def __init__(
        self, keys: tuple[ApiKey, ...], path: Path | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fixed = keys
        self._path = path
        self._clock = clock
        self._file_state = _state_of(path)
        self._checked_at = clock()
        self._keys = self._read()
        self._known = {each.name: each for each in self._keys}

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        return self._keys

    def find(self, name: str) -> ApiKey | None:
        """The key of that name, also of one that was valid when its request came and is no more."""
        return self._known.get(name)

    def refresh(self) -> None:
        """Read the file again where it has changed."""
        now = self._clock()
        if self._path is None or now - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at = now
        state = _state_of(self._path)
        if state == self._file_state:
            return
        self._file_state = state
        try:
            self._keys = self._read()
        except ConfigError as error:
            logger.error("%s; the keys that were valid before stay so", error)
        else:
            self._known.update({each.name: each for each in self._keys})
            logger.info("%s was read again: %d keys are valid", self._path, len(self._keys))

    def _read(self) -> tuple[ApiKey, ...]:
        if self._path is None:
            return self._fixed
        keys = (*self._fixed, *read_key_file(self._path))
        check_keys(keys, f"api_key_file: {self._path}, beside api_key")
        return keys


def _state_of(path: Path | None) -> _FileState:
    """What changes whenever the file does; None where there is none."""
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)
