"""Does AutoLoader, and DataLoader under `run`, pass torch's own tests of DataLoader? Prints who fails what.

    python -m studies torch_suite --file FILE [--only NAME,NAME]    # about ten minutes; tests with one of these in their names

FILE is test/stateful_dataloader/test_dataloader.py of github.com/pytorch/data: torch's test/test_dataloader.py with another
loader in one import, which is replaced here once more. It is fetched by whoever runs this and not kept here.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from studies.processes import ROOT
from studies.study import Row, Table

IMPORT = "from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader"
SIDES = {
    "DataLoader": "from torch.utils.data import DataLoader",
    "AutoLoader": "from autotune_loader import AutoLoader as DataLoader",
    "DataLoader under run": (
        "import autotune_loader; from torch.utils.data import DataLoader; autotune_loader.enable('run')"
    ),
}
BAR = "no side fails what DataLoader passes, but test_invalid_ctor_args_combinations (AutoLoader)"
SETTINGS = "[pytest]\naddopts =\n"
TIMEOUT_S = 900


def outcomes(text: str, replaced: str, names: list[str]) -> dict[str, str]:
    """What came of each test: passed, failed or skipped."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "test_dataloader.py")
        file.write_text(text.replace(IMPORT, replaced))
        Path(folder, "pytest.ini").write_text(SETTINGS)
        select = ["-k", " or ".join(names)] if names else []
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--junit-xml=out.xml"]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, *select, file.name], cwd=folder, timeout=TIMEOUT_S, check=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        found = {}
        for case in ElementTree.parse(Path(folder, "out.xml")).iter("testcase"):
            kinds = {each.tag for each in case}
            kind = "skipped" if "skipped" in kinds else "failed" if kinds & {"failure", "error"} else "passed"
            found[f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"] = kind
        return found


def rows(*, file: str = "", only: str = "") -> Table:
    text = Path(file).read_text() if Path(file).is_file() else ""
    if IMPORT not in text:
        raise SystemExit(f"--file {file!r} has no line {IMPORT!r}. Try test_dataloader.py of github.com/pytorch/data.")
    plain: dict[str, str] = {}
    for side, replaced in SIDES.items():
        found = outcomes(text, replaced, only.split(",") if only else [])
        plain = plain or found
        worse = [name for name, kind in found.items() if kind == "failed" and plain.get(name) != "failed"]
        counts = collections.Counter(found.values())
        cells = {"side": side, **{kind: counts[kind] for kind in ("passed", "failed", "skipped")}}
        is_met = all("test_invalid_ctor_args_combinations" in name for name in worse)
        yield Row({**cells, "failed here alone": ", ".join(worse)}, is_met)
