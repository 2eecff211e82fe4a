"""`python -m tests.support.accelerator FOLDER`: build it there; `PYTHONPATH=FOLDER` then gives a Python the device."""

import sys
from pathlib import Path

from tests.support.accelerator import built

print(built(Path(sys.argv[1]).resolve()))
