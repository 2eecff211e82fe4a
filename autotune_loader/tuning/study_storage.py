"""Where a study is kept, memory, a journal file or a database, and patience with a database that goes away for a while."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from autotune_loader.values.errors import MissingExtraError
from autotune_loader.values.secrets import without_secrets

log = logging.getLogger(__name__)
# A restart of a database server takes seconds, a failover of a managed one about a minute.
PATIENCE_S = 120.0
# One that is not there at all is most likely a typing error, and the budget is a minute.
FIRST_PATIENCE_S = 10.0
# What drivers and SQLAlchemy call a lost connection; by name, so that none of them need be installed.
_LOST = ("OperationalError", "InterfaceError", "AdminShutdown", "DisconnectionError", "PendingRollbackError")
_T = TypeVar("_T")


def patiently(
    call: Callable[[], _T],
    *,
    patience_s: float = PATIENCE_S,
    passes: Callable[[BaseException], bool] | None = None,
    mend: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> _T:
    """What `call` returns, tried again with growing pauses while the connection to the storage is lost.

    Args:
        call: something that may be done twice: its first try can have succeeded without our hearing of it.
        patience_s: after this long the storage's own error is raised.
        passes: whether an error is one that will pass; a lost connection if None.
        mend: done before each further try; SQLAlchemy's session, for one, refuses to work on after a lost connection.
        clock: seconds; a fake one in tests.
        sleep: a fake one in tests.
    """
    until, pause_s = clock() + patience_s, 0.1
    while True:
        try:
            return call()
        except Exception as error:
            if not (passes or is_connection_loss)(error) or clock() + pause_s > until:
                raise
            log.warning("the study's storage is not ready (%s); trying again in %.1f s", type(error).__name__, pause_s)
        sleep(pause_s)
        mend()
        pause_s = min(2 * pause_s, 5.0)


def is_connection_loss(error: BaseException | None) -> bool:
    """Whether the storage was lost, not misused: an operational error of the database, however deep it is wrapped."""
    while error is not None:
        if type(error).__name__ in _LOST:
            # SQLite calls a missing table or a full disk operational too; waiting helps with its locks only.
            return "sqlite" not in type(getattr(error, "orig", error)).__module__ or "locked" in str(error)
        error = error.__cause__
    return False


def open_database(url: str) -> Any:
    """Optuna's storage for a database URL; connections that the server has dropped are replaced before use.

    Raises:
        ValueError: the URL names nothing that can be opened, or nothing answers there.
        MissingExtraError: the database's driver is not installed.
    """
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import ArgumentError, OperationalError

    shown = without_secrets(url)
    options = {} if url.startswith("sqlite") else {"pool_pre_ping": True}
    try:
        _make_private(url)
        return patiently(
            lambda: RDBStorage(url, engine_kwargs=options), passes=_passes_at_first, patience_s=FIRST_PATIENCE_S
        )
    # Their own texts, and those of their causes, may quote the URL or pieces of it.
    except OperationalError as error:
        cause = without_secrets(str(error.orig).splitlines()[0])
        if "@" in cause:  # the end of a password that holds one is taken for the beginning of a host
            cause = type(error.orig).__name__
        raise ValueError(f"storage={shown!r} cannot be opened ({cause}); storage='study.journal' would work") from None
    except (ArgumentError, ValueError):
        raise ValueError(
            f"storage={shown!r} names no database that can be opened; storage='study.journal' would work"
        ) from None
    except ImportError:
        if url.startswith("postgresql"):
            raise MissingExtraError("storage='postgresql+psycopg://...'", "psycopg", "postgres") from None
        raise ValueError(
            f"storage={shown!r} needs a driver that is not installed; storage='sqlite:///study.db' would work"
        ) from None


def _make_private(url: str) -> None:
    """Create the file of an SQLite database, which SQLite would let others read: it will hold the user's tracebacks."""
    from sqlalchemy.engine import make_url

    parsed = make_url(url)
    name = parsed.database if parsed.get_backend_name() == "sqlite" else None
    if name and not name.startswith((":memory:", "file:")):
        with contextlib.suppress(OSError):  # SQLite says better what is wrong with it
            os.close(os.open(name, os.O_CREAT | os.O_RDWR, 0o600))


def _passes_at_first(error: BaseException) -> bool:
    """Hosts that open an empty database at once make its tables at once; all but one fail, and find them the next time."""
    text = f"{error} {error.__cause__}"
    return is_connection_loss(error) or any(
        sign in text for sign in ("already exists", "duplicate key", "UNIQUE constraint")
    )


def open_storage(storage: str | None) -> Any:
    """None for memory, an URL as it is, a path as a journal file that is readable by its owner alone."""
    if storage is None:
        return None
    if "://" in storage:
        return open_database(storage)
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = Path(storage)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    lock = lock_journal(path, _mend_torn_tail)
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


def lock_journal(path: Path, change: Callable[[Path], None]) -> Any:
    """Change a journal file under its lock; the lock."""
    from optuna.storages.journal import JournalFileSymlinkLock

    # A lock left by a killed writer is taken over after 3 s; Optuna's own default of 30 s would stall a restart.
    lock = JournalFileSymlinkLock(str(path), grace_period=3)
    lock.acquire()
    try:
        change(path)
    finally:
        lock.release()
    return lock


def _mend_torn_tail(path: Path) -> None:
    """Cut a journal back to its last whole line.

    After a kill in the middle of a write Optuna loads such a file, but its next append joins the torn line and is lost.
    """
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        log.warning("%s ended in the middle of a line; the last %d bytes were dropped", path, len(data) - whole)
        with path.open("r+b") as stream:
            stream.truncate(whole)


def let_go(storage: Any) -> None:
    """Close the connections of a database: Optuna leaves them to the garbage collector, and psycopg warns of that."""
    if hasattr(storage, "engine"):
        with contextlib.suppress(Exception):
            storage.remove_session()
            storage.engine.dispose()
