"""Where a study is kept: in memory, in a journal file or in a database."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

from autotune_loader.values.errors import MissingExtraError
from autotune_loader.values.secrets import without_secrets

log = logging.getLogger(__name__)
PAUSES_S = (0.2, 0.8, 2.0)
"""Between tries to open a database: hosts that open an empty one at once make its tables at once, and all but one fail."""
LIBPQ_S = 10
"""PostgreSQL's driver waits so long for a server to answer a connection, and for what was sent to arrive."""
GRACE_S = 3
"""A lock left by a killed writer is taken over after this; Optuna's own default of 30 s would stall a restart."""


def open_storage(storage: str | None) -> Any:
    """None for memory, a URL as it is, a path as a journal file that is readable by its owner alone."""
    if storage is None:
        return None
    if "://" in storage:
        return open_database(storage)
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    path = Path(storage)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    lock = JournalFileSymlinkLock(str(path), grace_period=GRACE_S)
    lock.acquire()
    try:
        _mend_torn_tail(path)
    finally:
        lock.release()
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


def _mend_torn_tail(path: Path) -> None:
    """Cut a journal back to its last whole line.

    After a kill in the middle of a write Optuna loads such a file, but its next append joins the torn line and is lost.
    """
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        log.warning("%s ended in the middle of a line; the last %d bytes were dropped", path, len(data) - whole)
        os.truncate(path, whole)


def open_database(url: str) -> Any:
    """Optuna's storage for a database URL; connections that the server has dropped are replaced before use.

    Raises:
        ValueError: the URL names nothing that can be opened, or nothing answers there.
        MissingExtraError: the database's driver is not installed.
    """
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import ArgumentError

    # What SQLAlchemy and drivers say may quote the URL or pieces of it, and so do the causes of their errors.
    told = f"storage={without_secrets(url)!r} "
    for pause_s in (*PAUSES_S, None):
        try:
            _make_private(url)
            return RDBStorage(url, engine_kwargs=_engine_options(url))
        except (ArgumentError, ValueError):
            told += "names no database that can be opened"
            break
        except ImportError:
            if url.startswith("postgresql"):
                raise MissingExtraError("storage='postgresql+psycopg://...'", "psycopg", "postgres") from None
            told += "needs a driver that is not installed"
            break
        except Exception as error:
            if pause_s is None:
                told += f"cannot be opened ({_cause(error)})"
                break
            time.sleep(pause_s)
    raise ValueError(f"{told}; storage='study.journal' would work")


def _engine_options(url: str) -> dict[str, Any]:
    if url.startswith("sqlite"):
        return {}
    # A network that is lost would be waited for as long as the kernel does.
    is_libpq = url.startswith(("postgresql://", "postgresql+psycopg"))
    patience = {"connect_timeout": LIBPQ_S, "tcp_user_timeout": 1000 * LIBPQ_S} if is_libpq else {}
    return {"pool_pre_ping": True, "connect_args": patience}


def _cause(error: Exception) -> str:
    origin = getattr(error, "orig", error)
    text = without_secrets(str(origin).splitlines()[0])
    # The end of a password that holds an @ is taken for the beginning of a host.
    return type(origin).__name__ if "@" in text else text


def _make_private(url: str) -> None:
    """Create the file of an SQLite database, which SQLite would let others read: it will hold the user's tracebacks."""
    from sqlalchemy.engine import make_url

    parsed = make_url(url)
    name = parsed.database if parsed.get_backend_name() == "sqlite" else None
    if name and not name.startswith((":memory:", "file:")):
        with contextlib.suppress(OSError):  # SQLite says better what is wrong with it
            os.close(os.open(name, os.O_CREAT | os.O_RDWR, 0o600))
