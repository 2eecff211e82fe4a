"""The recipes of docs/frameworks.md that need what is too large for the dev extra, each in an environment of its own:

python -m studies.libraries.recipes
"""

from __future__ import annotations

import os
import subprocess
import sys

from studies.libraries.environments import RECIPES, install, python_of
from studies.processes import ROOT


def status(library: str) -> int:
    """What pytest returns for the test of this recipe."""
    if why_not := install(library):
        print(f"{library} could not be installed: {why_not}")
        return 1
    test = f"tests/integrations/test_recipes.py::test_a_recipe_does_what_it_says[{library}]"
    command = [python_of(library), "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", test]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(max(map(status, RECIPES)))
