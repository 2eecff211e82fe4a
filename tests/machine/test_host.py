from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune_loader.machine import host

STAT = """cpu  100 10 20 999 5 3 2 7 50 5
cpu0 60 5 10 500 5 2 1 4 30 5
cpu2 40 5 10 499 0 1 1 3 20 0
intr 12345
"""


def test_busy_time_is_everything_but_idle_waiting_and_steal() -> None:
    # WHEN the machine's CPUs are added up; guest time is part of user time already
    cpu = host.parse_host_cpu(STAT, ticks_per_s=100)
    # THEN
    assert (cpu.cpus, cpu.busy_s, cpu.steal_s) == (2, pytest.approx(1.35), pytest.approx(0.07))


def test_only_the_cpus_asked_for_count_even_where_some_are_offline() -> None:
    cpu = host.parse_host_cpu(STAT, ticks_per_s=100, cpus={1, 2})
    assert (cpu.cpus, cpu.busy_s) == (1, pytest.approx(0.57))


def test_an_unreadable_stat_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "HAS_PROC", True)
    assert host.host_cpu(proc=tmp_path) is None


def test_the_machine_has_been_busy_in_either_way_of_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN what /proc says, where there is one
    by_proc = host.host_cpu()
    # WHEN psutil is asked instead
    monkeypatch.setattr(host, "HAS_PROC", False)
    by_psutil = host.host_cpu()
    # THEN both know of CPU time since boot
    assert by_proc is not None
    assert by_psutil is not None
    assert min(by_proc.busy_s, by_psutil.busy_s) > 0


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "getsid"), reason="needs sessions")
def test_members_of_a_group_are_found_after_its_leader_has_died() -> None:
    # GIVEN a leader of its own session that starts a child and ends
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '30']).pid)"
    leader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    with leader.stdout:
        orphan = int(leader.stdout.readline())
    leader.wait()
    # WHEN the group is asked for THEN the orphan is found
    try:
        assert host.process_group_members(leader.pid) == (orphan,)
    finally:
        os.kill(orphan, 9)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_told_what_works_there(platform: str) -> None:
    with pytest.raises(ImportError, match=rf"tune works on Linux only, and this is '{platform}'.*load_config\(\)"):
        host.require_linux("autotune_loader.tune", platform)
    host.require_linux("autotune_loader.tune", "linux")


@pytest.mark.process
def test_importing_what_tunes_says_so_at_once_and_the_rest_can_be_imported() -> None:
    script = "import sys; sys.platform = 'darwin'; from autotune_loader import load_config, LoaderConfig, AutoLoader"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "PlatformError: AutoLoader works on Linux only" in done.stderr
