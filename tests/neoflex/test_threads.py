"""`neoflex threads` against the real cpu_attn_svc."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import Run
from support.cpu_attention import Service
from support.inference import InferenceServer

from svc_common.cores import usable_cores


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service.wait_ready()
    service.end()


def test_they_are_shown_and_changed(service: Service, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    most = usable_cores()
    address = ("--address", service.listen)
    assert run("threads", *address).out == f"1 of at most {most}\n"
    assert run("threads", str(most), *address).out == f"{most} of at most {most}\n"
    assert service.status().num_threads == most
    # In a container the environment says where the services are.
    monkeypatch.setenv("NEOFLEX_CPU_ATTN_LISTEN", f"unix:/nowhere, {service.listen}")
    assert run("threads", "1", "--index", "1").out == f"1 of at most {most}\n"
    assert service.status().num_threads == 1
    ended = run("threads", str(most + 1), "--index", "1")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == f"error: INVALID_ARGUMENT: num_threads: must be in [1, {most}], is {most + 1}\n"
    assert service.status().num_threads == 1


def test_the_planner_says_where_they_are(service: Service, run: Run, server: InferenceServer) -> None:
    """As of a stack of `neoflex up`, whose services are where its run directory happens to be."""
    server.servicer.cpu_attention_addresses = ("unix:/nowhere", service.listen)
    planner = ("--planner", server.address)
    assert run("threads", "--index", "1", *planner).out == f"1 of at most {usable_cores()}\n"
    ended = run("threads", "--index", "2", *planner)
    assert ended.code == 2
    assert "must be from 0 to 1, is 2" in ended.err
    server.servicer.cpu_attention_addresses = ()
    ended = run("threads", *planner)
    assert ended.code == 1
    assert ended.err == f"error: {server.address} runs without a CPU attention service: cpu_attn.kv_bytes is 0\n"


def test_another_service_is_named_as_such(run: Run, server: InferenceServer) -> None:
    ended = run("threads", "--address", server.address)
    assert ended.code == 1
    said = f"what listens at {server.address} is another service, or another version: Method not found!"
    assert ended.err == f"error: UNIMPLEMENTED: {said}\n"


def test_what_is_no_service_is_said_before_anybody_is_called(run: Run, tmp_path: Path) -> None:
    for arguments in ("0", "70000", "--address a:1 --index 1", "--address nowhere", "--address a:1,b", "--planner b"):
        assert run("threads", *arguments.split()).code == 2
    nobody = f"unix:{tmp_path}/nobody"
    ended = run("threads", "--address", nobody)
    assert ended.code == 1
    assert ended.err.startswith(f"error: UNAVAILABLE: no answer from {nobody}: ")
