"""What can be known of pinned memory without a GPU: the driver's calls against its own package, and NUMA nodes."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from gpu_svc.cuda import driver, pinned

CALLS = {
    "cuMemHostRegister": ["p", "bytesize", "Flags"],
    "cuMemHostUnregister": ["p"],
    "cuMemHostGetDevicePointer": ["p", "Flags"],
    "cuDeviceGet": ["ordinal"],
    "cuDeviceGetPCIBusId": ["length", "dev"],
    "cuStreamWriteValue32": ["stream", "addr", "value", "flags"],
    "cuStreamWaitValue32": ["stream", "addr", "value", "flags"],
}


class Code(int):
    name = "CUDA_ERROR_NOT_SUPPORTED"


class Driver:
    """Plays the package: notes calls and answers as it does, with a tuple that begins with a code."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._code = Code(code)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: int) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            answers = {"cuMemHostGetDevicePointer": 4096, "cuDeviceGet": 1, "cuDeviceGetPCIBusId": b"0000:C1:00.0\0"}
            return (self._code, answers[name]) if name in answers else (self._code,)

        return call


def test_calls_are_those_of_the_package() -> None:
    bindings: Any = pytest.importorskip("cuda.bindings.driver")
    for name, parameters in CALLS.items():
        assert list(inspect.signature(getattr(bindings, name)).parameters) == parameters
    flags = bindings.CU_MEMHOSTREGISTER_PORTABLE, bindings.CU_MEMHOSTREGISTER_DEVICEMAP
    assert flags == (driver.PORTABLE, driver.MAPPED)
    assert bindings.CU_MEMHOSTREGISTER_READ_ONLY == driver.READ_ONLY
    assert bindings.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ == 0
    assert bindings.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT == 0
    assert int(bindings.CUresult.CUDA_SUCCESS) == 0


def test_calls_go_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Driver()
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    driver.register(8192, 4096, driver.PORTABLE | driver.MAPPED)
    assert driver.device_address(8192) == 4096
    assert driver.pci_slot(1) == "0000:c1:00.0"
    driver.write_word(77, 4160, 3)
    driver.wait_word(77, 4224, 2**31)
    driver.unregister(8192)
    assert fake.calls == [
        ("cuMemHostRegister", (8192, 4096, 3)),
        ("cuMemHostGetDevicePointer", (8192, 0)),
        ("cuDeviceGet", (1,)),
        ("cuDeviceGetPCIBusId", (16, 1)),
        ("cuStreamWriteValue32", (77, 4160, 3, 0)),
        ("cuStreamWaitValue32", (77, 4224, 2**31, 0)),
        ("cuMemHostUnregister", (8192,)),
    ]
    assert all(len(arguments) == len(CALLS[name]) for name, arguments in fake.calls)


def test_what_the_driver_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "bindings", lambda: Driver(801))
    with pytest.raises(driver.DriverError, match="CUDA_ERROR_NOT_SUPPORTED"):
        driver.wait_word(77, 4224, 1)


def test_a_device_has_a_node_where_the_kernel_knows_it(tmp_path: Path) -> None:
    for address, text in (("0000:65:00.0", "1\n"), ("0000:17:00.0", "-1\n")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(text)
    nodes = [pinned.node_of_slot(address, tmp_path) for address in ("0000:65:00.0", "0000:17:00.0", "0000:99:00.0")]
    assert nodes == [1, None, None]


def test_nodes_matter_where_there_are_several(tmp_path: Path) -> None:
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text("0-3,8\n")
    assert pinned.cpus_of_node(0, tmp_path) == set()
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("\n")
    assert pinned.cpus_of_node(0, tmp_path) == {0, 1, 2, 3, 8}
    assert pinned.cpus_of_node(1, tmp_path) == set()
    assert pinned.cpus_of_node(None, tmp_path) == set()
