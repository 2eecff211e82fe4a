"""`python -m autotune_loader` is the command line."""

import sys

from autotune_loader.cli import main

if __name__ == "__main__":
    sys.exit(main())
