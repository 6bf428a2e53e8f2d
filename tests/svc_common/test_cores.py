import os
import subprocess
import sys
from pathlib import Path

from svc_common.cores import CpuClaim, ordered_cpus, usable_cores

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


def make_topology(root: Path, siblings: dict[int, str], nodes: dict[int, int]) -> Path:
    for cpu, text in siblings.items():
        (root / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (root / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{text}\n")
        (root / f"cpu{cpu}" / f"node{nodes[cpu]}").mkdir()
    return root


def test_full_cores_come_first_and_nodes_stay_together(tmp_path: Path) -> None:
    # Two nodes of two cores with two threads each; neighbours in a core are 0-1, 2-3, ...
    siblings = {cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(8)}
    root = make_topology(tmp_path, siblings, {cpu: cpu // 4 for cpu in range(8)})
    assert ordered_cpus(range(8), False, root) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert ordered_cpus(range(8), True, root) == [6, 4, 2, 0, 7, 5, 3, 1]
    assert ordered_cpus({1, 2, 3, 7}, False, root) == [1, 2, 7, 3], (
        "a core whose first thread is not ours is a full one"
    )


def test_siblings_far_apart_and_interleaved_nodes(tmp_path: Path) -> None:
    siblings = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    root = make_topology(tmp_path, siblings, {cpu: cpu % 2 for cpu in range(8)})
    assert ordered_cpus(range(8), False, root) == [0, 2, 1, 3, 4, 6, 5, 7]
    assert ordered_cpus(range(8), True, root) == [3, 1, 2, 0, 7, 5, 6, 4]


def test_without_topology_numbers_order(tmp_path: Path) -> None:
    assert ordered_cpus({2, 0, 1}, False, tmp_path) == [0, 1, 2]
    assert ordered_cpus({2, 0, 1}, True, tmp_path) == [2, 1, 0]


def test_a_cpu_is_claimed_once_and_free_when_its_holder_ends() -> None:
    candidates = [90_001, 90_002, 90_003]
    hold = "import sys; from svc_common.cores import CpuClaim; c = CpuClaim([90_001], 1); print(c.cpus, flush=True)"
    command = [sys.executable, "-c", f"{hold}; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "[90001]\n"
        first = CpuClaim(candidates, 1)
        assert first.cpus == [90_002]
        assert CpuClaim(candidates, 3).cpus == [90_003]
        holder.kill()
        holder.wait()
    first.release()
    again = CpuClaim(candidates, 3)
    assert again.cpus[:2] == [90_001, 90_002]
    again.release()
