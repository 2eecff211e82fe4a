"""`python -m studies.compare`: the code of two pages of docs/how-to as it is, with its own budgets, and what it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
GIVEN = """
import torch
dataset = torch.utils.data.TensorDataset(torch.rand(4096, 8), torch.randint(0, 2, (4096,)))
model = torch.nn.Linear(8, 2)
"""


def main() -> None:
    pages = [ROOT / "docs" / "how-to" / name for name in ("compare.md", "jpeg-folder.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "page.py"
        script.write_text(GIVEN + "\n".join(blocks), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, script], cwd=folder, check=True, env=environment)


if __name__ == "__main__":
    main()
