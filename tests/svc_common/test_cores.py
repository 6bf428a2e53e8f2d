import os
from pathlib import Path

from svc_common.cores import usable_cores

AFFINITY = len(os.sched_getaffinity(0))


def cores(root: Path, own: str) -> int:
    (root / "own").write_text(own)
    return usable_cores(root, root / "own")


def test_without_a_quota_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path / "absent") == AFFINITY
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores(tmp_path, "0::/\n") == AFFINITY


def test_a_quota_of_version_2_counts_started_cores(tmp_path: Path) -> None:
    own = tmp_path / "a" / "b"
    own.mkdir(parents=True)
    (own / "cpu.max").write_text("max 100000\n")
    (own.parent / "cpu.max").write_text("50000 100000\n")
    assert cores(tmp_path, "0::/a/b\n") == 1
    (own.parent / "cpu.max").write_text(f"{AFFINITY * 100000 + 1} 100000\n")
    assert cores(tmp_path, "0::/a/b\n") == AFFINITY


def test_a_quota_of_version_1(tmp_path: Path) -> None:
    own = tmp_path / "cpu" / "job"
    own.mkdir(parents=True)
    (own / "cpu.cfs_quota_us").write_text("20000\n")
    (own / "cpu.cfs_period_us").write_text("100000\n")
    assert cores(tmp_path, "3:cpu,cpuacct:/job\n2:memory:/other\n") == 1
    (own / "cpu.cfs_quota_us").write_text("-1\n")
    assert cores(tmp_path, "3:cpu,cpuacct:/job\n") == AFFINITY
