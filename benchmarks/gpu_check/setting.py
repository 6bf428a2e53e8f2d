"""What all stages of a run are told."""

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Setting:
    device_type: str
    """"cuda" or "cpu"."""
    tiny: bool
    """Models, loads and times so small that a CPU does all of it in seconds."""
    seconds: float
    """That the stage should take."""
    out: Path
    """For what is kept."""
    scratch: Path
    """For what is not."""
    without: tuple[str, ...] = ()
    """Packages that count as not installed."""

    @property
    def device(self) -> torch.device:
        return torch.device(self.device_type)

    @property
    def on_cuda(self) -> bool:
        return self.device_type == "cuda"
