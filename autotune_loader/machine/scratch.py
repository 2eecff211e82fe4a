"""A folder for what processes of ours leave while they live: one whose name is short enough for sockets.

The kernel takes 107 characters for a socket's path (unix(7)). Below `TMPDIR`, multiprocessing needs 32 of them for
`/pymp-xxxxxxxx/listener-xxxxxxxx`, and a folder of our own comes in between: with a longer `TMPDIR` workers would hang.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

LONGEST_ROOT = 48
"""Characters of the folder's own path that leave room for `/autotune-loader-xxxxxxxx` and for multiprocessing's."""
OTHERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - where a system has its temporary files


def scratch_root() -> str:
    """The temporary folder of this process, or where its name is too long the first other one in which files can be made.

    Where there is none it is the long one all the same: most start methods need no socket with a path.
    """
    own = tempfile.gettempdir()
    usable = [place for place in OTHERS if Path(place).is_dir() and os.access(place, os.W_OK | os.X_OK)]
    return own if len(os.fsencode(own)) <= LONGEST_ROOT else next(iter(usable), own)
