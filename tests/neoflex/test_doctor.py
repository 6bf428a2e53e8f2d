"""`neoflex doctor` on machines made of files."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.command import Run

from neoflex.doctor import Finding, Level, examine, processors
from svc_common.config import Config, parse


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A good one without a GPU; tests change its files."""
    files = {
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force\n",
        "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
        "sys/devices/system/node/node0/cpulist": "0-3\n",
        "dev/shm/.keep": "",
        "proc/meminfo": f"MemTotal: {32 * 2**20} kB\n",
        "proc/self/cgroup": "0::/box\n",
        "sys/fs/cgroup/box/pids.max": "max\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(processors, "gpu_name", lambda: None)
    monkeypatch.setattr(processors, "usable_cores", lambda: 4)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(processors, "usable_memory_bytes", lambda: 16 * 2**30)
    monkeypatch.setattr(processors, "read_spec", lambda files: SimpleNamespace(num_parameters=134_515_008))
    return tmp_path


def find(machine: Path, topic: str, **sections: dict[str, object]) -> Finding:
    config = parse(dict(sections), "test") if sections else Config()
    return next(item for item in examine(config, machine) if item.topic == topic)


def test_a_good_machine_has_no_problem(machine: Path) -> None:
    levels = {item.topic: item.level for item in examine(Config(), machine)}
    good = ("GPU", "model", "cores", "memory", "huge pages", "NUMA nodes", "clock", "CPU frequency")
    good += ("addresses", "cache directory", "processes and threads")
    assert {topic: levels[topic] for topic in good} == dict.fromkeys(good, Level.OK)


@pytest.mark.parametrize(
    ("file", "text", "topic", "advice"),
    [
        ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [never]", "huge pages", "echo advise >"),
        ("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet", "clock", "prefer tsc"),
        ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave", "CPU frequency", "performance"),
        ("sys/devices/system/node/node1/cpulist", "4-7", "NUMA nodes", "one CPU attention service per node"),
    ],
)
def test_what_is_slow_is_noted(machine: Path, file: str, text: str, topic: str, advice: str) -> None:
    (machine / file).parent.mkdir(exist_ok=True)
    (machine / file).write_text(text)
    found = find(machine, topic)
    assert found.level is Level.NOTE
    assert advice in found.advice


def test_more_threads_than_cores(machine: Path) -> None:
    found = find(machine, "cores", gpu={"num_threads": 4}, cpu_attn={"num_threads": 1})
    assert found.level is Level.PROBLEM
    assert "are 5 together" in found.advice


def test_more_kv_than_memory(machine: Path) -> None:
    found = find(machine, "memory", gpu={"kv_bytes": "9GiB"}, cpu_attn={"kv_bytes": "9GiB"})
    assert found.level is Level.PROBLEM
    assert found.advice.startswith("lower cpu_attn.kv_bytes or gpu.kv_bytes")
    assert "16.0 GiB to use, the limit of this cgroup; the machine has 32.0 GiB" in found.found


def test_kv_that_takes_what_is_left_needs_a_cap_to_be_left_of(machine: Path) -> None:
    found = find(machine, "memory", gpu={"kv_bytes": "auto"})
    assert (found.level, found.advice[:44]) == (Level.PROBLEM, 'gpu.kv_bytes "auto" needs gpu.memory_bytes: ')
    found = find(machine, "memory", gpu={"kv_bytes": "auto", "memory_bytes": "14GiB"}, cpu_attn={"kv_bytes": "1GiB"})
    assert found.level is Level.OK
    assert "asked: KV 14.5 GiB, weights up to 513.1 MiB" in found.found
    found = find(machine, "memory", gpu={"kv_bytes": "auto", "memory_bytes": "14GiB"}, cpu_attn={"kv_bytes": "3GiB"})
    assert found.level is Level.PROBLEM


def test_weights_count_as_kv_does(machine: Path) -> None:
    """134.5 million of them, at 4 bytes each unless said otherwise."""
    found = find(machine, "memory", gpu={"kv_bytes": "8GiB"}, cpu_attn={"kv_bytes": "7800MiB"})
    assert found.level is Level.PROBLEM
    assert "asked: KV 15.6 GiB, weights up to 513.1 MiB" in found.found
    found = find(machine, "memory", gpu={"kv_bytes": "8GiB", "dtype": "bf16"}, cpu_attn={"kv_bytes": "7800MiB"})
    assert found.level is Level.OK
    assert "weights up to 256.6 MiB" in found.found


def test_two_services_at_one_address(machine: Path) -> None:
    same = {"listen": "127.0.0.1:50051"}
    found = find(machine, "addresses", gpu=same)
    assert (found.level, found.found) == (Level.PROBLEM, "not all different")
    assert found.advice == "planner.listen and gpu.listen are both 127.0.0.1:50051: each needs its own"
    free = {"listen": "127.0.0.1:0"}
    assert find(machine, "addresses", planner=free, gpu=free).level is Level.OK


def test_few_threads(machine: Path) -> None:
    (machine / "sys/fs/cgroup/box/pids.max").write_text("100\n")
    found = find(machine, "processes and threads")
    assert (found.level, found.found) == (Level.NOTE, "at most 100 in this cgroup")


def test_nowhere_to_keep_anything(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = find(machine, "cache directory")
    assert found.level is Level.NOTE
    assert "XDG_CACHE_HOME" in found.advice


def test_a_pool_larger_than_shared_memory(machine: Path) -> None:
    found = find(machine, "shared memory", cpu_attn={"kv_bytes": 2**60, "segment_dir": "/dev/shm"})
    assert found.level is Level.PROBLEM
    assert "--shm-size" in found.advice
    found = find(machine, "files", cpu_attn={"segment_dir": "/nowhere"})
    assert found.advice == "cpu_attn.segment_dir: /nowhere: there is no such directory"


def test_a_model_that_is_not_here(machine: Path) -> None:
    found = find(machine, "model", model={"source": "/no/such/model"})
    assert found.level is Level.PROBLEM


def test_cuda_without_a_gpu_and_a_gpu_without_cuda(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(machine, "GPU", gpu={"device": "cuda"}).level is Level.PROBLEM
    monkeypatch.setattr(processors, "gpu_name", lambda: "NVIDIA A10G, 23028 MiB")
    assert find(machine, "GPU").found == "NVIDIA A10G, 23028 MiB"
    assert find(machine, "GPU", gpu={"device": "cpu"}).level is Level.NOTE
    assert find(machine, "locked memory").topic == "locked memory"


def test_the_command_ends_with_1_where_it_would_not_run(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text('[model]\nsource = "/no/such/model"\n')
    ended = run("doctor", "--config", str(config), "--json")
    assert ended.code == 1
    findings = [json.loads(line) for line in ended.out.splitlines()]
    model = next(item for item in findings if item["topic"] == "model")
    assert model["level"] == "problem"
    assert "/no/such/model" in model["advice"]
    config.write_text("[gpu]\nkv_byte = 1\n")
    assert "gpu.kv_byte: unknown key" in run("doctor", "--config", str(config)).err


def test_what_stands_open_is_said(machine: Path) -> None:
    assert find(machine, "access").level is Level.OK
    opened: dict[str, dict[str, object]] = {"planner": {"listen": "0.0.0.0:50051"}, "gpu": {"listen": "[::]:50052"}}
    config = parse(dict(opened), "test")
    found = [item.found for item in examine(config, machine) if item.topic == "access"]
    unencrypted = "what it says and is told crosses the network unencrypted"
    assert found == [
        f"planner.listen: 0.0.0.0:50051 is open: whoever reaches it may call, and {unencrypted}",
        f"gpu.listen: [::]:50052 is open: whoever reaches it may call, and {unencrypted}",
    ]


def test_what_the_configuration_names_is_looked_at(machine: Path) -> None:
    assert find(machine, "files").level is Level.OK
    found = find(machine, "files", model={"chat_template": "/nowhere"})
    assert (found.level, found.advice) == (Level.PROBLEM, "model.chat_template: /nowhere: No such file or directory")
