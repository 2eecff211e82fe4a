"""A virtual environment for each library, over the one that runs the study: torch above all is not installed again."""

from __future__ import annotations

import site
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

CACHE = Path.home() / ".cache" / "autotune_loader_libraries"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


@dataclass(frozen=True)
class Environment:
    """What is installed for one library."""

    library: str
    """Name of the distribution, whose version is in the result."""
    requirements: tuple[str, ...] = ()
    """Beside what the study runs in; empty where that has the library."""
    options: tuple[str, ...] = ()
    """Of `pip install`: without dependencies where those would bring another torch, or much that no attempt uses."""

    @property
    def python(self) -> str:
        """The interpreter to run its attempts with."""
        return str(CACHE / self.library / "bin" / "python") if self.requirements else sys.executable

    def make(self) -> str | None:
        """Install it, unless that is done; returns why it could not be."""
        folder = CACHE / self.library
        done, wanted = folder / ".installed", "\n".join((*self.options, *self.requirements))
        if not self.requirements or (done.exists() and done.read_text() == wanted):
            return None
        venv.create(folder, clear=True, with_pip=False)
        (own,) = folder.glob("lib/python*/site-packages")
        # A .pth file adds folders behind its own, so that what is installed here is found first.
        (own / "base.pth").write_text("\n".join(site.getsitepackages()))
        command = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "-c", str(CONSTRAINTS)]
        command += [*self.options, *self.requirements]
        installed = subprocess.run(command, capture_output=True, text=True, check=False)
        if installed.returncode:
            return next((line for line in installed.stderr.splitlines() if line.startswith("ERROR")), "pip failed")
        if TORCHVISION in self.requirements:
            (own / "sitecustomize.py").write_text(DECLARE_OPERATORS)
        done.write_text(wanted)
        return None


NO_DEPS = ("--no-deps",)
# What scikit-learn needs beside numpy.
SCIKIT = ("scikit-learn", "scipy", "joblib", "threadpoolctl")
TORCHVISION = "torchvision==0.28.0"  # the one that was built for the torch in constraints.txt
# What a library for cloud storage imports, used or not.
BOTO = ("boto3", "botocore", "jmespath", "s3transfer")
DALI = ("optree", "gast", "astunparse", "six", "wheel", "makefun", "dm-tree", "nvidia-ml-py")
FASTAI = ("fastcore", "fastdownload", "fastprogress<1.1", "fasttransform", "plum-dispatch", "beartype")
# Its wheel is built for CUDA: beside a torch for CPUs its operators are missing, and declaring them is enough to import it.
DECLARE_OPERATORS = """
import torch

try:
    import torchvision
except RuntimeError:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
ENVIRONMENTS = (
    Environment("torchdata"),
    Environment("datasets"),
    Environment("transformers"),
    Environment("accelerate"),
    Environment("lightning"),
    Environment("pandas"),
    Environment("litdata", ("litdata", "tifffile", "obstore", *BOTO), NO_DEPS),
    Environment("webdataset", ("webdataset",)),
    Environment(
        "mosaicml-streaming",
        ("mosaicml-streaming", "brotli", "zstd", "python-snappy", "cramjam", "catalogue", TORCHVISION, *BOTO),
        NO_DEPS,
    ),
    Environment("monai", ("monai",)),
    Environment("torchio", ("torchio",)),
    Environment("tensordict", ("tensordict",)),
    Environment("torch_geometric", ("torch_geometric",)),
    Environment("albumentations", ("albumentations",)),
    Environment("torchvision", (TORCHVISION,), NO_DEPS),
    Environment("timm", ("timm", TORCHVISION), NO_DEPS),
    Environment("pytorch-metric-learning", ("pytorch-metric-learning", *SCIKIT), NO_DEPS),
    Environment("pytorch-forecasting", ("pytorch-forecasting", "scikit-base", *SCIKIT), NO_DEPS),
    Environment("fastai", ("fastai", *FASTAI, TORCHVISION, *SCIKIT), NO_DEPS),
    Environment("nvidia-dali-cuda120", ("nvidia-dali-cuda120", *DALI), NO_DEPS),
    Environment("ray", ("ray",)),
)
