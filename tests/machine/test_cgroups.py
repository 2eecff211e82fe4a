from __future__ import annotations

from pathlib import Path

import pytest

from autotune_loader.machine import cgroups

V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def fake_root(tmp_path: Path, self_cgroup: str, mountinfo: str, files: dict[str, str]) -> Path:
    """A root directory with a `/proc/self` and the given files."""
    files = {"proc/self/cgroup": self_cgroup, "proc/self/mountinfo": mountinfo, **files}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000\n", None),
        ("max", None),
        ("50000 100000\n", 0.5),
        ("300000 100000", 3.0),
        ("250000", 2.5),
        ("", None),
    ],
)
def test_cpu_max_is_read_in_every_form(text: str, cores: float | None) -> None:
    assert cgroups.parse_cpu_max(text) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1\n", None), ("0\n", None), ("150000\n", 1.5)])
def test_a_v1_quota_is_a_number_of_cores_or_none(quota: str, cores: float | None) -> None:
    assert cgroups.parse_cfs_quota(quota, "100000\n") == cores


@pytest.mark.parametrize(("text", "limit"), [("max\n", None), ("9223372036854771712\n", None), ("1048576\n", 1 << 20)])
def test_an_unlimited_memory_limit_is_none(text: str, limit: int | None) -> None:
    assert cgroups.parse_memory_limit(text) == limit


def test_own_paths_are_found_for_every_controller() -> None:
    text = "4:memory:/docker/a:b\n2:cpu,cpuacct:/docker/x\n0::/pod/app\n"
    assert cgroups.parse_self_cgroup(text) == {
        "memory": "/docker/a:b",
        "cpu": "/docker/x",
        "cpuacct": "/docker/x",
        "": "/pod/app",
    }


def test_mounts_keep_spaces_in_their_paths_and_skip_other_file_systems() -> None:
    # GIVEN a mount point with an octal space, and a tmpfs
    text = "24 1 0:23 / /dev/shm rw - tmpfs tmpfs rw\n32 31 0:29 /a\\040b /mnt/c\\040d rw - cgroup cgroup rw,cpu\n"
    # WHEN it is parsed
    (mount,) = cgroups.parse_cgroup_mounts(text)
    # THEN only the cgroup is there, with its paths as they are
    assert (mount.root, mount.mount_point, mount.controllers) == ("/a b", "/mnt/c d", {"rw", "cpu"})


def test_a_quota_of_a_parent_binds_too(tmp_path: Path) -> None:
    # GIVEN an unlimited leaf below a parent with two cores, below another with eight
    root = fake_root(
        tmp_path,
        "0::/pods/pod7/app\n",
        V2_MOUNT,
        {
            "sys/fs/cgroup/pods/pod7/app/cpu.max": "max 100000",
            "sys/fs/cgroup/pods/pod7/cpu.max": "200000 100000",
            "sys/fs/cgroup/pods/cpu.max": "800000 100000",
        },
    )
    # WHEN the limits are read
    limits = cgroups.cpu_limits(root)
    # THEN both are there, the nearest first, with their files
    assert [(limit.value, Path(limit.source).parent.name) for limit in limits] == [(2.0, "pod7"), (8.0, "pods")]


def test_a_v1_container_finds_its_limits_below_the_mounted_part(tmp_path: Path) -> None:
    # GIVEN a container without a cgroup namespace: its path is the host's, and only its own subtree is mounted
    root = fake_root(
        tmp_path,
        "2:cpu,cpuacct:/docker/3f2a/inner\n",
        "32 31 0:29 /docker/3f2a /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n",
        {
            "sys/fs/cgroup/cpu,cpuacct/inner/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/inner/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    )
    assert [limit.value for limit in cgroups.cpu_limits(root)] == [0.5]


def test_a_path_outside_the_mount_leaves_the_mount_itself(tmp_path: Path) -> None:
    # GIVEN a process that entered a namespace from outside
    root = fake_root(tmp_path, "0::/../sibling\n", V2_MOUNT, {"sys/fs/cgroup/cpu.max": "100000 100000"})
    assert [limit.value for limit in cgroups.cpu_limits(root)] == [1.0]


def test_memory_left_is_the_limit_minus_use_without_inactive_cache(tmp_path: Path) -> None:
    # GIVEN 100 bytes allowed, 80 used of which 30 are cache that the kernel would drop, and a parent with less left
    root = fake_root(
        tmp_path,
        "0::/pod/app\n",
        V2_MOUNT,
        {
            "sys/fs/cgroup/pod/app/memory.max": "100",
            "sys/fs/cgroup/pod/app/memory.current": "80",
            "sys/fs/cgroup/pod/app/memory.stat": "anon 50\ninactive_file 30\n",
            "sys/fs/cgroup/pod/memory.max": "200",
            "sys/fs/cgroup/pod/memory.high": "190",
            "sys/fs/cgroup/pod/memory.current": "180",
            "sys/fs/cgroup/pod/memory.stat": "inactive_file 0\n",
        },
    )
    assert [limit.value for limit in cgroups.memory_available(root)] == [50, 20, 10]
    assert [limit.value for limit in cgroups.memory_limits(root)] == [100, 200, 190]


def test_memory_of_v1_is_read(tmp_path: Path) -> None:
    root = fake_root(
        tmp_path,
        "4:memory:/a\n",
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        {
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1000",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "400",
            "sys/fs/cgroup/memory/a/memory.stat": "total_inactive_file 100\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert [limit.value for limit in cgroups.memory_available(root)] == [700]


@pytest.mark.parametrize("broken", ["", "garbage", "a b c", "-"])
def test_a_broken_file_is_no_limit(tmp_path: Path, broken: str) -> None:
    root = fake_root(
        tmp_path, "0::/\n", V2_MOUNT, {"sys/fs/cgroup/cpu.max": broken, "sys/fs/cgroup/memory.max": broken}
    )
    assert (cgroups.cpu_limits(root), cgroups.memory_limits(root)) == ((), ())


def test_a_system_without_cgroups_has_no_limits(tmp_path: Path) -> None:
    assert (cgroups.cpu_limits(tmp_path), cgroups.memory_available(tmp_path)) == ((), ())
