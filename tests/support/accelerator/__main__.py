"""`python -m tests.support.accelerator FOLDER` builds it there, for a Python's PYTHONPATH."""

import sys
from pathlib import Path

from tests.support.accelerator import built

print(built(Path(sys.argv[1]).resolve()))
