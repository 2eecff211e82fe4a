"""Descriptors of the kernel's, from a Python that has no function for them, too."""

from __future__ import annotations

import os
import select
import subprocess
from pathlib import Path

import pytest

from autotune_loader.machine.kernel import memfd, pidfd

LACKING = pytest.mark.parametrize("lacks", [False, True])


def without(name: str, lacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacks:
        monkeypatch.delattr(os, name)


@LACKING
def test_a_file_in_memory_is_not_inherited(lacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    without("memfd_create", lacks, monkeypatch)
    with os.fdopen(memfd("batch"), "r+b") as file:
        assert str(Path(f"/proc/self/fd/{file.fileno()}").readlink()).startswith("/memfd:batch")
        assert not os.get_inheritable(file.fileno())
        assert file.write(b"x" * 100_000) == 100_000


@LACKING
@pytest.mark.process
def test_a_process_can_be_waited_for(lacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    without("pidfd_open", lacks, monkeypatch)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        end = pidfd(process.pid)
        assert select.select([end], [], [], 0)[0] == []
        assert not os.get_inheritable(end)
        process.stdin.close()  # type: ignore[union-attr]
        assert select.select([end], [], [], 10)[0] == [end]
    os.close(end)


@LACKING
def test_what_the_kernel_refuses_is_an_oserror(
    lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    without("pidfd_open", lacks, monkeypatch)
    with pytest.raises(ProcessLookupError):
        pidfd(2**22 + 1)
