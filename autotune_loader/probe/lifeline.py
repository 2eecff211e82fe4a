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
        scratch: a folder, which is made here; the parent removes it, or this process where the parent is gone.
    """
    os.mkdir(scratch, 0o700)  # noqa: PTH102 - pathlib takes time
    ended = f"{scratch}-ended"

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(lifeline_fd, 1)
        with contextlib.suppress(OSError):
            os.rename(scratch, ended)  # noqa: PTH104 - where no worker makes a socket meanwhile
        shutil.rmtree(ended, ignore_errors=True)
        if os.getpgrp() == os.getpid():  # our own group, as the parent started us: workers included
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    # Otherwise each worker that sends a tensor makes a folder of its own (`pymp-...`), and one that is killed leaves it there.
    # There is no public way. Children take the setting over, however they are started.
    vars(multiprocessing.current_process()).get("_config", {})["tempdir"] = scratch
    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def let_go() -> None:
    """Remove the folder, also where it is being removed: this process would end before that is done."""
    scratch = vars(multiprocessing.current_process())["_config"]["tempdir"]
    for folder in (scratch, f"{scratch}-ended"):
        shutil.rmtree(folder, ignore_errors=True)
