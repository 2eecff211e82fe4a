"""Descriptors of the kernel's, from a Python that has no function for them, too."""

import errno
import os
import select
import subprocess
from pathlib import Path

import pytest

from autotune_loader.machine import kernel
from autotune_loader.machine.kernel import memfd, pidfd


@pytest.fixture(params=[False, True], ids=["", "an older Python"], autouse=True)
def python(request, monkeypatch):
    if request.param:
        monkeypatch.delattr(os, "memfd_create", raising=False)
        monkeypatch.delattr(os, "pidfd_open", raising=False)


def test_a_file_in_memory_is_not_inherited():
    with os.fdopen(memfd("batch"), "r+b") as file:
        assert str(Path(f"/proc/self/fd/{file.fileno()}").readlink()).startswith("/memfd:batch")
        assert not os.get_inheritable(file.fileno())
        assert file.write(b"x" * 100_000) == 100_000


@pytest.mark.process
def test_a_process_can_be_waited_for():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        end = pidfd(process.pid)
        assert select.select([end], [], [], 0)[0] == []
        assert not os.get_inheritable(end)
        process.stdin.close()
        assert select.select([end], [], [], 10)[0] == [end]
    os.close(end)


def test_what_the_kernel_refuses_is_an_oserror(monkeypatch):
    with pytest.raises(ProcessLookupError):
        pidfd(2**22 + 1)
    # AND on a processor whose numbers are not known
    monkeypatch.setattr(kernel, "MEMFD_CREATE", None)
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with pytest.raises(OSError, match=f"Errno {errno.ENOSYS}"):
        memfd("batch")
