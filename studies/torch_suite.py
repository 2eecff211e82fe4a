"""Does AutoLoader, and DataLoader under `run`, pass torch's own tests of DataLoader? Prints who fails what.

    python -m studies.torch_suite FILE [NAME ...]       # about ten minutes; NAME: only tests with one of these in their names

FILE is test/stateful_dataloader/test_dataloader.py of github.com/pytorch/data: torch's test/test_dataloader.py with another
loader in one import, which is replaced here once more. It is fetched by whoever runs this and not kept here.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from studies.processes import ROOT

IMPORT = "from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader"
SIDES = {
    "DataLoader": "from torch.utils.data import DataLoader",
    "AutoLoader": "from autotune_loader import AutoLoader as DataLoader",
    "DataLoader under run": (
        "import autotune_loader; from torch.utils.data import DataLoader; autotune_loader.enable('run')"
    ),
}
SETTINGS = "[pytest]\naddopts =\n"
TIMEOUT_S = 900


def outcomes(text: str, replaced: str, names: list[str]) -> dict[str, str]:
    """What came of each test: passed, failed or skipped."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "test_dataloader.py")
        file.write_text(text.replace(IMPORT, replaced))
        Path(folder, "pytest.ini").write_text(SETTINGS)
        select = ["-k", " or ".join(names)] if names else []
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--junit-xml=out.xml",
        ]
        subprocess.run(
            [*command, *select, file.name], cwd=folder, timeout=TIMEOUT_S, check=False, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        found = {}
        for case in ElementTree.parse(Path(folder, "out.xml")).iter("testcase"):
            kinds = {each.tag for each in case}
            kind = "skipped" if "skipped" in kinds else "failed" if kinds & {"failure", "error"} else "passed"
            found[f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"] = kind
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    text = options.file.read_text()
    if IMPORT not in text:
        parser.error(f"{options.file} has no line {IMPORT!r}; test_dataloader.py of github.com/pytorch/data would work")
    plain: dict[str, str] = {}
    worse = 0
    for side, replaced in SIDES.items():
        found = outcomes(text, replaced, options.names)
        plain = plain or found
        print(f"{side}: {dict(collections.Counter(found.values()))}", flush=True)
        for name, kind in found.items():
            if kind == "failed":
                same = plain.get(name) == "failed"
                worse += not same
                print(f"  {re.sub(r'^Test', '', name)}{' (DataLoader, too)' if same else ''}", flush=True)
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
