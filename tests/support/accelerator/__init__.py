"""A simulated accelerator for tests: the device "sim", on which real models train.

    built(folder) ──► simulated_accelerator/{__init__.py, simulated.so}
                      simulated_accelerator-0.dist-info/entry_points.txt   group torch.backends

Work and copies take time on it. Torch loads such a backend by itself, so every process with the
folder on PYTHONPATH has `torch.device("sim")` and `torch.sim` (see `device.py`) once it has
imported torch. The process of pytest never has.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENTRY_POINTS = "[torch.backends]\nsim = simulated_accelerator:register\n"
METADATA = "Metadata-Version: 2.1\nName: simulated-accelerator\nVersion: 0\n"


def compiler() -> str | None:
    """The C++ compiler of this machine."""
    return shutil.which("c++") or shutil.which("g++")


def built(folder: Path) -> Path:
    """The folder, with the accelerator compiled for this torch, once.

    Raises:
        RuntimeError: there is no C++ compiler, or it failed.
    """
    import torch

    source = HERE / "simulated.cpp"
    parts = source.read_bytes(), Path(__file__).read_bytes(), torch.__version__.encode()
    stamp = hashlib.sha256(b"".join(parts)).hexdigest()
    package, record = folder / "simulated_accelerator", folder / "simulated_accelerator-0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    record.mkdir(exist_ok=True)
    with (folder / "stamp").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if lock.read() != stamp:
            _compile(source, package / "simulated.so")
            lock.truncate(0)
            lock.write(stamp)
        for path, text in {
            package / "__init__.py": (HERE / "device.py").read_text(),
            record / "METADATA": METADATA,
            record / "entry_points.txt": ENTRY_POINTS,
        }.items():
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
    return folder


def built_nvml(folder: Path) -> Path:
    """A stand-in of `libnvidia-ml.so.1` (see `nvml.c`), compiled in the folder.

    A process that has loaded it finds no other.

    Raises:
        RuntimeError: there is no compiler.
    """
    library = folder / "libnvidia-ml.so.1"
    flags = ["-x", "c", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{library.name}"]
    _run([*flags, HERE / "nvml.c", "-o", library])
    return library


def _compile(source: Path, library: Path) -> None:
    import torch

    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    made = library.with_suffix(f".{os.getpid()}")
    flags = ["-O1", "-std=c++20", "-fPIC", "-shared", abi, *includes]
    _run([*flags, source, "-o", made, *libraries])
    made.rename(library)


def _run(arguments: list[str | Path]) -> None:
    if (command := compiler()) is None:
        raise RuntimeError("the stand-ins need a C++ compiler. Try to put c++ or g++ on PATH.")
    done = subprocess.run([command, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command} has failed:\n{done.stderr[-4000:]}")
