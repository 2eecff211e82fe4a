from __future__ import annotations

from pathlib import Path

import pytest

from autotune_loader.machine import cgroups


def fake_root(tmp_path: Path, self_cgroup: str, files: dict[str, str]) -> Path:
    """A root with a `/proc/self/cgroup` and these files below `/sys/fs/cgroup`."""
    files = {"proc/self/cgroup": self_cgroup} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


V1_QUOTA = {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}
NO_QUOTA = {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000"}
LAYOUTS = {
    # what /proc/self/cgroup says, files, cores of each quota
    "a leaf without, its parents with": (
        "0::/pods/pod7/app\n",
        {
            "pods/pod7/app/cpu.max": "max 100000\n",
            "pods/pod7/cpu.max": "250000",  # of a period that is not named
            "pods/cpu.max": "50000 100000",
        },
        [2.5, 0.5],
    ),
    "entered from outside": ("0::/../sibling\n", {"cpu.max": "100000 100000"}, [1.0]),
    "v1, of which a container sees its own part only": (
        "4:memory:/docker/3f2a/inner\n2:cpu,cpuacct:/docker/3f2a/inner\n",
        {f"cpu,cpuacct/inner/{name}": text for name, text in NO_QUOTA.items()}
        | {f"cpu,cpuacct/{name}": text for name, text in V1_QUOTA.items()},
        [0.5],
    ),
    "v1, a folder for each controller, beside v2": (
        "2:cpu:/job\n0::/\n",
        {f"cpu/job/{name}": text for name, text in V1_QUOTA.items()} | {"unified/cpu.max": "300000 100000"},
        [0.5, 3.0],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_quota_above_this_process_counts(tmp_path: Path, layout: str) -> None:
    groups, files, cores = LAYOUTS[layout]
    limits = cgroups.cpu_limits(fake_root(tmp_path, groups, files))
    assert [limit.value for limit in limits] == cores
    assert all(Path(limit.source).is_file() for limit in limits)


def test_memory_left_is_the_limit_minus_use_without_inactive_cache(tmp_path: Path) -> None:
    # GIVEN 100 bytes allowed, 80 used of which 30 are cache that the kernel would drop, and a parent with less left
    root = fake_root(
        tmp_path,
        "0::/pod/app\n",
        {
            "pod/app/memory.max": "100",
            "pod/app/memory.current": "80",
            "pod/app/memory.stat": "anon 50\ninactive_file 30\n",
            "pod/memory.max": "200",
            "pod/memory.high": "190",
            "pod/memory.current": "180",
            "pod/memory.stat": "inactive_file 0\n",
            "memory.max": "max\n",
        },
    )
    assert [limit.value for limit in cgroups.memory_available(root)] == [50, 20, 10]
    assert [limit.value for limit in cgroups.memory_limits(root)] == [100, 200, 190]


def test_memory_of_v1_is_read_and_its_huge_number_is_no_limit(tmp_path: Path) -> None:
    root = fake_root(
        tmp_path,
        "4:memory:/a\n",
        {
            "memory/a/memory.limit_in_bytes": "1000",
            "memory/a/memory.usage_in_bytes": "400",
            "memory/a/memory.stat": "total_inactive_file 100\n",
            "memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert [limit.value for limit in cgroups.memory_available(root)] == [700]
    assert [limit.value for limit in cgroups.memory_limits(root)] == [1000]


@pytest.mark.parametrize("broken", ["", "garbage", "a b c", "-", "100 0"])
def test_a_broken_file_is_no_limit_nor_is_there_one_without_cgroups(tmp_path: Path, broken: str) -> None:
    root = fake_root(tmp_path, "0::/\nnonsense\n", {"cpu.max": broken, "memory.max": broken, "memory.stat": broken})
    assert (cgroups.cpu_limits(root), cgroups.memory_limits(root), cgroups.memory_available(root)) == ((), (), ())
    assert (cgroups.cpu_limits(tmp_path / "none"), cgroups.memory_available(tmp_path / "none")) == ((), ())
