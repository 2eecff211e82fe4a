"""Tries a wheel in an empty environment of each Python: `python -m tests.wheel WHEEL PYTHON ...`.

`make dist` runs it. The wheel alone watches a script, and tune() says what to install. The first
Python also runs the demo, with its extra. A second Python of one version is skipped, and so is one
for which there is no torch of constraints.txt.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
SCRIPT = """
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, index):
        return torch.tensor(index**2)

for batch in DataLoader(Squares(), batch_size=8):
    batch.sum()
"""


def ran(*command: str | Path, folder: Path = ROOT, code: int = 0, says: str = "") -> str:
    """What a command prints, which has to end with that exit code and say that."""
    done = subprocess.run(command, cwd=folder, env=ALONE, text=True, capture_output=True)
    printed = done.stdout + done.stderr
    if done.returncode != code or says not in printed:
        expected = f"exit code {code} and {says!r} expected"
        sys.exit(f"{printed}\n{[*map(str, command)]}: exit code {done.returncode}; {expected}")
    return printed


def tried(wheel: Path, python: str, folder: Path, *, with_demo: bool) -> str:
    """Use the wheel as somebody would who has just installed it; what there is to say of it."""
    ran(python, "-m", "venv", folder)
    pip = (folder / "bin/python", "-m", "pip", "install", "--quiet")
    install = (*pip, "-c", ROOT / "constraints.txt")
    torch = subprocess.run([*install, "torch"], capture_output=True, text=True)
    if "No matching distribution found for torch" in torch.stderr:
        return "skipped, there is no torch of constraints.txt for it"
    ran(*install, wheel)
    program = folder / "bin/autotune-loader"
    ran(program, "--help")
    (folder / "train.py").write_text(SCRIPT)
    ran(program, "watch", "train.py", folder=folder, says="autotune-loader watch: 1 loader")
    extra = "pip install 'autotune-loader[tune]'"
    ran(program, "tune", "train.py:Squares", folder=folder, code=2, says=extra)
    if with_demo:
        ran(*install, f"{wheel}[demo]")
        subprocess.run([program, "demo"], cwd=folder, env=ALONE, check=True)
    return ran(program, "--version").strip()


def require_absolute_links(wheel: str) -> None:
    """README as an index shows it leads nowhere but to the web and to its own sections."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    if found := re.findall(r"(?:\]\(|src=\"|href=\")(?!https?:|#)[^)\"]+", text):
        sys.exit(f"{wheel}: links of README that setup.py does not make absolute: {found}")


def main(wheel: str, *pythons: str) -> None:
    require_absolute_links(wheel)
    seen = set[str]()
    for python in pythons:
        script = "import sys; print('%d.%d' % sys.version_info[:2])"
        version = ran(python, "-c", script).strip()
        if version not in seen:
            with tempfile.TemporaryDirectory(prefix="wheel-", dir=ROOT / "build") as folder:
                said = tried(Path(wheel).resolve(), python, Path(folder), with_demo=not seen)
            print(f"Python {version}: {said}", flush=True)
        seen.add(version)


if __name__ == "__main__":
    main(*sys.argv[1:])
