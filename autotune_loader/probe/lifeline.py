"""The probe process ends with its parent, however that ends, and leaves no file. Imports nothing that takes time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import threading


def hold(lifeline_fd: int, scratch: str) -> None:
    """Kill the whole process group when the parent's end of the lifeline closes; keep all sockets in a folder until then.

    Args:
        lifeline_fd: closed when the parent ends.
        scratch: a folder, which the parent removes, or this process where the parent is gone.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(lifeline_fd, 1)
        let_go()
        if os.getpgrp() == os.getpid():  # our own group, as the parent started us: workers included
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    # Otherwise each worker that sends a tensor makes a folder of its own (`pymp-...`), and one that is killed leaves it there.
    # There is no public way. Children take the setting over, however they are started.
    vars(multiprocessing.current_process()).get("_config", {})["tempdir"] = scratch
    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def let_go() -> None:
    """Remove the folder. Where the parent is gone whoever notices first does: this process may end before the other has."""
    shutil.rmtree(vars(multiprocessing.current_process())["_config"]["tempdir"], ignore_errors=True)
