"""What `doctor` says of GPUs: the real nvidia-ml-py on a driver's library of our own, each time in a process of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pynvml")
pytestmark = pytest.mark.process
A, B, C = (f"{name} (80 GiB)" for name in "ABC")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A folder with the library that `fake_nvml.c` makes."""
    compiler, folder = shutil.which("cc"), tmp_path_factory.mktemp("driver")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = ["-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1"]
    subprocess.run([compiler, *library, Path(__file__).with_name("fake_nvml.c")], check=True)
    return folder


def gpus(**environ):
    script = "from autotune_loader.cli.doctor import gpus_text; print(gpus_text())"
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**kept, **environ}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("mask", "refused", "told"),
    [
        # the expected devices stand here one by one: what CUDA shows for a mask is not computed a second time
        (None, "", f"cuda:0 {A}, cuda:1 {B}, cuda:2 {C}"),
        (" 2,0 ", "", f"cuda:0 {C}, cuda:1 {A}"),
        ("0,-1,2", "", f"cuda:0 {A}, none for '-1' of CUDA_VISIBLE_DEVICES=0,-1,2"),
        ("3", "", "none for '3' of CUDA_VISIBLE_DEVICES=3"),
        ("", "", "none for '' of CUDA_VISIBLE_DEVICES="),
        ("GPU-cccc,GPU-aaaa1111", "", f"cuda:0 {C}, cuda:1 {A}"),
        ("GPU-aa", "", "none for 'GPU-aa' of CUDA_VISIBLE_DEVICES=GPU-aa"),  # two begin like that
        ("MIG-dddd4444", "", "cuda:0 H100 MIG 1g.10gb (10 GiB)"),
        ("MIG-ffff", "", "cuda:0 not told of (Not Found)"),
        (None, "nvmlInit=9", "none that NVML shows (Driver Not Loaded)"),
        (
            None,
            "nvmlDeviceGetHandleByIndex=4@1",
            f"cuda:0 {A}, cuda:1 not told of (Insufficient Permissions), cuda:2 {C}",
        ),
        ("0,1", "nvmlDeviceGetName=999", "cuda:0 Unknown Error (80 GiB), cuda:1 Unknown Error (80 GiB)"),
        ("0,1", "nvmlDeviceGetMemoryInfo=3@0", f"cuda:0 A (Not Supported), cuda:1 {B}"),
    ],
)
def test_what_nvml_does_not_tell_is_said_in_words_and_the_other_gpus_are_shown(mask, refused, told, driver):
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    assert gpus(LD_LIBRARY_PATH=str(driver), FAKE_NVML=refused, **environ) == told


def test_a_driver_without_a_gpu_shows_none(driver):
    assert gpus(LD_LIBRARY_PATH=str(driver), NO_GPU="1") == "none"


def test_a_machine_without_a_driver_has_no_gpu_to_show(tmp_path):
    (tmp_path / "libnvidia-ml.so.1").touch()  # no library, whatever this machine has
    assert gpus(LD_LIBRARY_PATH=str(tmp_path)) == "none that NVML shows (NVML Shared Library Not Found)"
