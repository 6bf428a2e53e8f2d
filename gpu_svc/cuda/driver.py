"""The few calls of the CUDA driver that torch does not offer, through cuda-bindings; all need the device's context."""

import logging
from functools import cache
from types import ModuleType
from typing import Any

import torch

READ_ONLY, PORTABLE, MAPPED = 8, 1, 2
"""Flags of cudaHostRegister; the driver's CU_MEMHOSTREGISTER_READ_ONLY, _PORTABLE and _DEVICEMAP are the same."""

_SLOT_CHARACTERS = 16
"""Of a PCI slot's name, its closing zero included."""

logger = logging.getLogger(__name__)


class DriverError(Exception):
    """A call that the driver refused."""


@cache
def bindings() -> ModuleType | None:
    """None where cuda-bindings is not installed, or finds no driver that it knows how to call."""
    try:
        from cuda.bindings import driver

        _checked(driver.cuInit(0))
    except Exception as error:
        logger.info("cuda-bindings cannot be used: %s: %s", type(error).__name__, error)
        return None
    module: ModuleType = driver
    return module


def enter(device: torch.device) -> None:
    """Makes the device's context the calling thread's, which a driver's call does not by itself."""
    torch.zeros(1, device=device)


def register(address: int, num_bytes: int, flags: int) -> None:
    """Pins host memory. Raises DriverError."""
    driver = bindings()
    if driver is not None:
        _checked(driver.cuMemHostRegister(address, num_bytes, flags))
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(address, num_bytes, flags))
    if code:
        _forget_error()
        raise DriverError(f"error {code} of the CUDA runtime")


def unregister(address: int) -> None:
    """Of what `register` pinned. Raises DriverError."""
    driver = bindings()
    if driver is not None:
        _checked(driver.cuMemHostUnregister(address))
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostUnregister(address))
    if code:
        _forget_error()
        raise DriverError(f"error {code} of the CUDA runtime")


def device_address(address: int) -> int:
    """Where the device sees pinned memory. Raises DriverError.

    Without cuda-bindings the host's own address, which is the same on all systems with a unified address space.
    """
    driver = bindings()
    return int(_checked(driver.cuMemHostGetDevicePointer(address, 0))) if driver is not None else address


def pci_slot(index: int) -> str:
    """Of a device, as in "0000:65:00.0"; nothing where the driver does not say."""
    driver = bindings()
    if driver is None:
        return ""
    try:
        name = _checked(driver.cuDeviceGetPCIBusId(_SLOT_CHARACTERS, _checked(driver.cuDeviceGet(index))))
    except DriverError:
        return ""
    return bytes(name).split(b"\0")[0].decode().lower()


def write_word(stream: int, address: int, value: int) -> None:
    """Enqueues a write of 32 bits after all that the stream wrote, also to host memory. Raises DriverError."""
    driver = bindings()
    assert driver is not None
    _checked(driver.cuStreamWriteValue32(stream, address, value, 0))  # 0: with a memory barrier before it


def wait_word(stream: int, address: int, value: int) -> None:
    """Has the stream wait until (int32)(word - value) >= 0. Raises DriverError."""
    driver = bindings()
    assert driver is not None
    _checked(driver.cuStreamWaitValue32(stream, address, value, 0))  # 0: CU_STREAM_WAIT_VALUE_GEQ


def _checked(answer: tuple[Any, ...]) -> Any:
    """The driver's functions return an error code and then what they are asked for, if anything."""
    if int(answer[0]):
        raise DriverError(getattr(answer[0], "name", str(answer[0])))
    return answer[1] if len(answer) > 1 else None


def _forget_error() -> None:
    """The runtime keeps the error of a refused call, and the next launch would raise it."""
    try:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    except RuntimeError:
        pass
