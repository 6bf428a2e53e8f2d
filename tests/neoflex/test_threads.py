"""`neoflex threads` against the real cpu_attn_svc."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import Run
from support.cpu_attention import Service

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


def test_what_is_no_service_is_said_before_anybody_is_called(run: Run, tmp_path: Path) -> None:
    for arguments in (("0",), ("70000",), ("--index", "1"), ("--address", "nowhere"), ("--address", "a:1,b")):
        assert run("threads", *arguments).code == 2
    nobody = f"unix:{tmp_path}/nobody"
    ended = run("threads", "--address", nobody)
    assert ended.code == 1
    assert ended.err.startswith(f"error: UNAVAILABLE: no answer from {nobody}: ")
