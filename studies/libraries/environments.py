"""A virtual environment for each library, over the one that runs the study: torch above all is not installed again."""

from __future__ import annotations

import site
import subprocess
import sys
import venv
from pathlib import Path

CACHE = Path.home() / ".cache" / "autotune_loader_libraries"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
TORCHVISION = "torchvision==0.28.0"  # the one that was built for the torch in constraints.txt
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
# What scikit-learn needs beside numpy; what a library for cloud storage imports, used or not; and so on.
SCIKIT = "scikit-learn scipy joblib threadpoolctl narwhals"
BOTO = "boto3 botocore jmespath s3transfer"
STREAMING = "brotli zstd python-snappy cramjam catalogue"
FASTAI = "fastcore fastdownload fastprogress<1.1 fasttransform plum-dispatch beartype"
DALI = "optree gast astunparse six wheel makefun dm-tree nvidia-ml-py"
ENVIRONMENTS = {
    **dict.fromkeys(("torchdata", "datasets", "transformers", "accelerate", "lightning", "pandas"), ""),
    "litdata": f"--no-deps litdata tifffile obstore {BOTO}",
    "webdataset": "webdataset",
    "mosaicml-streaming": f"--no-deps mosaicml-streaming {STREAMING} {TORCHVISION} {BOTO}",
    "monai": "monai",
    "torchio": "torchio",
    "tensordict": "tensordict",
    "torch_geometric": "torch_geometric",
    "albumentations": "albumentations",
    "torchvision": f"--no-deps {TORCHVISION}",
    "timm": f"--no-deps timm {TORCHVISION}",
    "pytorch-metric-learning": f"--no-deps pytorch-metric-learning {SCIKIT}",
    "pytorch-forecasting": f"--no-deps pytorch-forecasting scikit-base {SCIKIT}",
    "fastai": f"--no-deps fastai {FASTAI} {TORCHVISION} {SCIKIT}",
    "nvidia-dali-cuda120": f"--no-deps nvidia-dali-cuda120 {DALI}",
    "ray": "ray[train]",
}
"""By the name of the distribution, what `pip install` is told beside what the study runs in; nothing where that has it.

Without dependencies where those would bring another torch, or much that no attempt uses."""
RECIPES = {"wandb": "wandb", "tensorboard": "tensorboard", "ray": ENVIRONMENTS["ray"]}
"""The same for recipes of `docs/frameworks.md`: what is too large for the dev extra."""


def python_of(library: str) -> str:
    """The interpreter to run its attempts with."""
    return str(CACHE / library / "bin" / "python") if (RECIPES | ENVIRONMENTS)[library] else sys.executable


def install(library: str) -> str | None:
    """Install it, unless that is done; returns why it could not be."""
    folder, wanted = CACHE / library, (RECIPES | ENVIRONMENTS)[library]
    done = folder / ".installed"
    if not wanted or (done.exists() and done.read_text() == wanted):
        return None
    venv.create(folder, clear=True, with_pip=False)
    (own,) = folder.glob("lib/python*/site-packages")
    # A .pth file adds folders behind its own, so that what is installed here is found first.
    (own / "base.pth").write_text("\n".join(site.getsitepackages()))
    command = [sys.executable, "-m", "pip", "--python", python_of(library), "install", "--quiet", "-c", CONSTRAINTS]
    installed = subprocess.run([*command, *wanted.split()], capture_output=True, text=True, check=False)
    if installed.returncode:
        return next((line for line in installed.stderr.splitlines() if line.startswith("ERROR")), "pip failed")
    if TORCHVISION in wanted:
        (own / "sitecustomize.py").write_text(DECLARE_OPERATORS)
    done.write_text(wanted)
    return None
