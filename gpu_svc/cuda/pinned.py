"""Host memory that a device reads and writes by itself: pinned where it lies, seen as the device's, near its node."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_svc.cuda import driver

_NODES = Path("/sys/devices/system/node")
_PCI_DEVICES = Path("/sys/bus/pci/devices")

logger = logging.getLogger(__name__)


class Pinned:
    """Memory that is pinned until `close`. Use `pin`."""

    def __init__(self, address: int, num_bytes: int, device: torch.device) -> None:
        """Raises DriverError where the device can't address it."""
        self.address = address
        self.num_bytes = num_bytes
        self.device = device
        self.device_address = driver.device_address(address)

    def view(self, tensor: Tensor) -> Tensor:
        """A tensor in this memory as one of the device, whose kernels then read and write it over the link."""
        offset = tensor.data_ptr() - self.address
        assert tensor.is_contiguous()
        assert 0 <= offset <= self.num_bytes - tensor.nbytes
        if not tensor.numel():
            return torch.empty_like(tensor, device=self.device)
        view = torch.as_tensor(_DeviceBytes(self.device_address + offset, tensor.nbytes), device=self.device)
        return view.view(tensor.dtype).view(tensor.shape)

    def close(self) -> None:
        """While it is still mapped, and once the device uses it no more."""
        driver.enter(self.device)
        try:
            driver.unregister(self.address)
        except driver.DriverError as error:
            logger.warning("memory cannot be given back to the kernel's paging: %s", error)


def pin(address: int, num_bytes: int, device: torch.device, what: str, read_only: bool = False) -> Pinned | None:
    """None, and a line in the log, where it can't be: a limit of locked memory, a container, a kind of memory.

    `read_only`: mapped without the right to write. Takes long where there is much of it.
    """
    driver.enter(device)
    start_s = time.perf_counter()
    try:
        driver.register(address, num_bytes, driver.PORTABLE | driver.MAPPED | (driver.READ_ONLY if read_only else 0))
    except driver.DriverError as error:
        logger.warning("%s, %d bytes, cannot be pinned (%s): copies take a way round", what, num_bytes, error)
        return None
    seconds = time.perf_counter() - start_s
    rate = num_bytes / max(seconds, 1e-9) / 1e9
    logger.info("%s: %d bytes pinned in %.0f ms, %.1f GB/s", what, num_bytes, 1e3 * seconds, rate)
    try:
        return Pinned(address, num_bytes, device)
    except driver.DriverError as error:
        logger.warning("%s has no address on the device (%s)", what, error)
        driver.unregister(address)
        return None


class _DeviceBytes:
    """Bytes at an address of the device, in the CUDA array interface, version 2."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def staging(num_bytes: int, device: torch.device) -> Tensor:
    """Pinned bytes [n] near the device."""
    with near(device):
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


@contextmanager
def near(device: torch.device) -> Iterator[None]:
    """Meanwhile the calling thread is on the device's NUMA node, where memory comes from that it touches first."""
    cpus = cpus_of_node(numa_node(device))
    before = os.sched_getaffinity(0)
    if not cpus & before:
        yield
        return
    os.sched_setaffinity(0, cpus & before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def numa_node(device: torch.device) -> int | None:
    """Of the device's slot; None where the kernel knows none."""
    slot = driver.pci_slot(torch.cuda.current_device() if device.index is None else device.index)
    return node_of_slot(slot) if slot else None


def node_of_slot(address: str, devices: Path = _PCI_DEVICES) -> int | None:
    """`address` as in "0000:65:00.0"."""
    try:
        node = int((devices / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cpus_of_node(node: int | None, nodes: Path = _NODES) -> set[int]:
    """Empty where there is only one node, or nobody knows which it is."""
    if node is None or len(list(nodes.glob("node[0-9]*"))) < 2:
        return set()
    try:
        ranges = (nodes / f"node{node}" / "cpulist").read_text().strip().split(",")
    except OSError:
        return set()
    cpus: set[int] = set()
    for part in filter(None, ranges):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
