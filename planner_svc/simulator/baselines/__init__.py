"""What the serving scheduler is compared with, behind the same Protocol: NEO's published rules, and the GPU alone."""

from planner_svc.simulator.baselines.gpu_only import GpuOnly
from planner_svc.simulator.baselines.neo import Neo

__all__ = ["GpuOnly", "Neo"]
