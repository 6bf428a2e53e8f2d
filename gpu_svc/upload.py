"""Host arrays to the device without waiting for it."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """To a GPU by way of pinned memory, which torch keeps until the copy is done; on the CPU a view."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
