"""The folder of the disk tier: who may read it, what lies in it, and how the block file is replaced.

Any thread may call these methods. The folder is made with mode 0700 and every file in it with 0600 from the first
moment; SQLite gives its side files the mode of the database. The block file is created and removed under a file lock
(`flock`, which ends with its process), so that no process removes the side files of a database that another one has
just created.

The block file is never opened here while it exists: closing any descriptor of a file drops all POSIX locks that the
process has on it, SQLite's among them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvd.errors import StartupError

DATABASE_NAME = "kvd-blocks.sqlite3"
LOCK_NAME = "kvd-blocks.lock"
_SIDE_FILES = ("-wal", "-shm", "-journal")
_LOCK_SECONDS = 5.0

FileIdentity = tuple[int, int]
"""(device, inode): a file that was replaced by another one of the same name has a new identity."""


class DiskStoreError(Exception):
    """The store could not do something now; one line. Nothing was stored or read, and the store stays usable.

    is_busy: another process had the file; the next attempt may well succeed.
    """

    def __init__(self, message: str, *, is_busy: bool = False) -> None:
        super().__init__(message)
        self.is_busy = is_busy


class DiskFolder:
    """`disk_cache.path`. The constructor makes the folder or checks it.

    Raises StartupError when the path is not a folder, belongs to somebody else, cannot be written, or is open to
    others and holds files of theirs.
    """

    def __init__(self, path: str | os.PathLike[str], log: Callable[[str], None]) -> None:
        self.path = Path(path)
        self.database = self.path / DATABASE_NAME
        self._log = log
        self._prepare()

    def _prepare(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            status = self.path.stat()
            if not stat.S_ISDIR(status.st_mode):
                raise StartupError(f"disk_cache.path {self.path} is not a folder")
            if status.st_uid != os.geteuid():
                raise StartupError(f"disk_cache.path {self.path} belongs to another user: name a folder of your own")
            if stat.S_IMODE(status.st_mode) & 0o077:
                self._close_to_others()
            if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
                raise StartupError(f"disk_cache.path {self.path} cannot be written to")
            self._check_files()
            with self.lock():
                pass
        except OSError as error:
            raise StartupError(f"disk_cache.path {self.path} cannot be used: {error.strerror or error}") from None
        except DiskStoreError as error:
            raise StartupError(f"disk_cache.path {self.path} cannot be used: {error}") from None

    def _close_to_others(self) -> None:
        """Take others' rights away from a folder that holds nothing but kvd's files."""
        if any(not name.startswith(DATABASE_NAME) and name != LOCK_NAME for name in os.listdir(self.path)):
            raise StartupError(
                f"disk_cache.path {self.path} is open to other users and holds other files: "
                f"name a folder that kvd has for itself"
            )
        self.path.chmod(0o700)
        self._log(f"{self.path} was open to other users and is now closed to them (mode 0700)")

    def _check_files(self) -> None:
        """Nobody else's file, link or device may stand where kvd's files do."""
        for name in (LOCK_NAME, DATABASE_NAME, *(DATABASE_NAME + suffix for suffix in _SIDE_FILES)):
            path = self.path / name
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(status.st_mode):
                raise StartupError(f"{path} is not a plain file: remove it")
            if status.st_uid != os.geteuid():
                raise StartupError(f"{path} belongs to another user: remove it")
            if stat.S_IMODE(status.st_mode) != 0o600:
                path.chmod(0o600)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Nobody else creates or removes the block file meanwhile. Raises DiskStoreError after a few seconds."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path / LOCK_NAME, flags, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise DiskStoreError(f"another process holds {LOCK_NAME}", is_busy=True) from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(descriptor)

    def identity(self) -> FileIdentity | None:
        """Which file is the block file now; None when there is none."""
        try:
            status = self.database.lstat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def create(self) -> FileIdentity:
        """Make an empty block file unless there is one. Under the lock."""
        with contextlib.suppress(FileExistsError):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(self.database, flags, 0o600))
        identity = self.identity()
        if identity is None:
            raise DiskStoreError(f"{self.database} vanished")
        return identity

    def remove(self) -> None:
        """Remove block file and side files. Under the lock.

        Who still has them open goes on with files without a name, and sees by `identity` that they are gone.
        """
        for suffix in ("", *_SIDE_FILES):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.database}{suffix}")

    def wal_bytes(self) -> int:
        """Size of the write-ahead log."""
        try:
            return os.stat(f"{self.database}-wal").st_size
        except FileNotFoundError:
            return 0

    def num_bytes(self) -> int:
        """Bytes of everything that kvd keeps in the folder."""
        total = 0
        for suffix in ("", *_SIDE_FILES):
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(f"{self.database}{suffix}").st_size
        return total
