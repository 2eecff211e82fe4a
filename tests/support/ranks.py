"""Two ranks on this machine, as torchrun starts them, but forked: importing torch, or a framework, takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HARD_DEADLINE_S = 110
"""What a framework's import, the probes and a handful of bursts need, with a lot to spare on a busy machine."""

TORCHRUN = """
import runpy, signal, uuid
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def rank():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has the agent's handler, which waits
    runpy.run_path("job.py", run_name="__main__")  # and returns nothing: the agent would send it

elastic_launch(LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=2, run_id=uuid.uuid4().hex,
    rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
), rank)()
"""


def two_ranks(python: Any, job: str, folder: Path, **environ: str) -> Any:
    """Starts a script on both, in a `PreloadedPython`."""
    (folder / "job.py").write_text(job)
    (folder / "torchrun.py").write_text(TORCHRUN)
    given = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
    return python.start("torchrun.py", folder=folder, environ=given)
