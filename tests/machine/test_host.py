from __future__ import annotations

import os
import subprocess
import sys

import pytest

from autotune_loader.machine import host
from autotune_loader.machine.processes import process_group_members


def test_only_the_cpus_asked_for_count() -> None:
    # GIVEN the machine, and one of its CPUs
    whole, one = host.host_cpu(), host.host_cpu({0})
    # THEN both have been busy since boot, the one less than all
    assert whole is not None
    assert one is not None
    assert one.cpus == 1 <= whole.cpus
    assert 0 < one.busy_s <= whole.busy_s


def test_a_machine_that_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(percpu: bool) -> None:
        raise FileNotFoundError("/proc/stat")

    monkeypatch.setattr("psutil.cpu_times", hidden)
    assert host.host_cpu() is None


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
        assert process_group_members(leader.pid) == (orphan,)
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
