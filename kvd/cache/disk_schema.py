"""How the block file is laid out as an SQLite database, and which SQLite errors mean what.

Names and bytes lie in two tables, so that names can be read without the pages of the blocks. `last_used` and `value`
are counted in blocks that were ever stored; the block with the smallest `value` is the first to leave.
"""

from __future__ import annotations

import os
import sqlite3

APPLICATION_ID = 0x6B766463  # "kvdc"
USER_VERSION = 1
PAGE_BYTES = 65536
"""The largest page SQLite has. Blocks of 190 KB are written 1.35 times as fast as with pages of 16 KiB."""
_BUSY_SECONDS = 2.0
_CACHE_KIB = 16384

_SCHEMA = (
    "CREATE TABLE block (id INTEGER PRIMARY KEY AUTOINCREMENT, group_id INTEGER NOT NULL, key BLOB NOT NULL, "
    "parent_key BLOB NOT NULL, token_ids BLOB NOT NULL, data_digest BLOB NOT NULL, checksum BLOB NOT NULL, "
    "hits INTEGER NOT NULL, last_used INTEGER NOT NULL, value INTEGER NOT NULL)",
    "CREATE UNIQUE INDEX block_by_key ON block (group_id, key)",
    "CREATE INDEX block_by_parent ON block (group_id, parent_key)",
    "CREATE INDEX block_by_value ON block (value)",
    "CREATE TABLE payload (id INTEGER PRIMARY KEY, data BLOB NOT NULL)",
)

BLOCKS = "SELECT CAST(value AS INTEGER), id, group_id, key, parent_key FROM block AS this"
LEAVES = (
    f"{BLOCKS} WHERE NOT EXISTS "
    "(SELECT 1 FROM block AS child WHERE child.group_id = this.group_id AND child.parent_key = this.key)"
)


class UnusableFile(Exception):
    """The file is a database, but not one of this format, or too large for what it is allowed."""


def connect(path: os.PathLike[str], max_pages: int) -> sqlite3.Connection:
    """Open the block file, and lay it out when it is empty.

    Raises UnusableFile, or sqlite3.Error. The connection is in autocommit mode and may be handed from thread to thread.
    """
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.text_factory = bytes  # damaged text would not decode
        for pragma in (
            "trusted_schema = OFF",
            "cell_size_check = ON",
            "mmap_size = 0",
            "secure_delete = OFF",
            "temp_store = MEMORY",
            f"cache_size = -{_CACHE_KIB}",
            # An fsync per checkpoint, not per commit: a power cut may lose the newest blocks, never tear one.
            "synchronous = NORMAL",
            # The store makes checkpoints itself, before a transaction that might not fit the log.
            "wal_autocheckpoint = 0",
            f"page_size = {PAGE_BYTES}",
        ):
            connection.execute(f"PRAGMA {pragma}")
        _check_or_lay_out(connection)
        if _number(connection, "page_count") > max_pages:
            raise UnusableFile("it is larger than disk_cache.size")
        connection.execute(f"PRAGMA max_page_count = {max_pages}")
    except BaseException:
        connection.close()
        raise
    return connection


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


def _check_or_lay_out(connection: sqlite3.Connection) -> None:
    marks = _number(connection, "application_id"), _number(connection, "user_version")
    schema = [
        row[0] for row in connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY rowid")
    ]
    if marks == (0, 0) and not schema:
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != b"wal":
            raise sqlite3.OperationalError("this file system cannot hold a database that is shared between processes")
        connection.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {USER_VERSION}")
        connection.execute("COMMIT")
        return
    if marks[0] != APPLICATION_ID:
        raise UnusableFile("it is not kvd's")
    if marks[1] != USER_VERSION:
        raise UnusableFile(f"its format is {marks[1]}, this kvd has {USER_VERSION}")
    ours = {statement.encode() for statement in _SCHEMA}
    if {text for text in schema if not text.startswith(b"CREATE TABLE sqlite_sequence")} != ours:
        raise UnusableFile("its tables are not kvd's")
    if _number(connection, "page_size") != PAGE_BYTES:
        raise UnusableFile("its pages have another size")


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; that of misuse for errors which Python raised by itself."""
    return (getattr(error, "sqlite_errorcode", None) or sqlite3.SQLITE_MISUSE) & 0xFF


def is_busy(error: sqlite3.Error) -> bool:
    """Another process has the file; it is worth trying again."""
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)


def is_damage(error: sqlite3.Error) -> bool:
    """The file does not hold what SQLite or the schema says it must."""
    extended = getattr(error, "sqlite_errorcode", None)
    return extended == sqlite3.SQLITE_IOERR_SHORT_READ or _code(error) in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_FORMAT,
    )
