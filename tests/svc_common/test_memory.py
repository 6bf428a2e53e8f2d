"""The memory a process may use, and sizes that exceed it."""

from pathlib import Path

import pytest

from svc_common.config import ConfigError
from svc_common.memory import available_bytes, check_fits_memory, huge_page_bytes, usable_memory_bytes


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    400 kB\n")
    return path


def usable(root: Path, own: str, meminfo: Path) -> int:
    (root / "own").write_text(own)
    return usable_memory_bytes(root, root / "own", meminfo)


def test_without_a_limit_the_machine_counts(tmp_path: Path, meminfo: Path) -> None:
    assert usable_memory_bytes(tmp_path, tmp_path / "absent", meminfo) == 1_024_000
    (tmp_path / "memory.max").write_text("max\n")
    assert usable(tmp_path, "0::/\n", meminfo) == 1_024_000


def test_pages_that_could_be_given_up_are_available(meminfo: Path) -> None:
    assert available_bytes(meminfo) == 409_600


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path, meminfo: Path) -> None:
    own = tmp_path / "a" / "b"
    own.mkdir(parents=True)
    (own / "memory.max").write_text("700000\n")
    (own.parent / "memory.max").write_text("500000\n")
    assert usable(tmp_path, "0::/a/b\n", meminfo) == 500_000
    (own.parent / "memory.max").write_text("9999999999\n")
    assert usable(tmp_path, "0::/a/b\n", meminfo) == 700_000


def test_a_limit_of_version_1(tmp_path: Path, meminfo: Path) -> None:
    own = tmp_path / "memory" / "job"
    own.mkdir(parents=True)
    (own / "memory.limit_in_bytes").write_text("300000\n")
    assert usable(tmp_path, "3:cpu,cpuacct:/other\n2:memory:/job\n", meminfo) == 300_000


def test_what_can_never_fit_is_refused_by_key() -> None:
    check_fits_memory("gpu.kv_bytes", 10, 10)
    with pytest.raises(ConfigError, match=r"gpu\.kv_bytes is 11 bytes, there are 10 bytes"):
        check_fits_memory("gpu.kv_bytes", 11, 10)


def test_huge_pages_of_one_file_are_counted(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "7f0000000000-7f0000400000 rw-s 00000000 00:1a 77                       /dev/shm/neoflex-a b/region\n"
        "Size:               8192 kB\nShmemPmdMapped:     4096 kB\nPrivate_Hugetlb:       0 kB\nVmFlags: rd wr sh\n"
        "7f0000400000-7f0000800000 rw-s 00400000 00:1a 77                       /dev/shm/neoflex-a b/region\n"
        "ShmemPmdMapped:        0 kB\nShared_Hugetlb:     2048 kB\n"
        "7f0000800000-7f0000a00000 rw-p 00000000 00:00 0 \n"
        "ShmemPmdMapped:     2048 kB\n"
    )
    assert huge_page_bytes("/dev/shm/neoflex-a b/region", smaps) == 6 * 2**20
    assert huge_page_bytes("/dev/shm/neoflex-a", smaps) == 0
