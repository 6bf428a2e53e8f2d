"""How gpu_svc and cpu_attn_svc exchange tensors: shared memory, doorbells, and one message per iteration.

The executor's side is `TensorPlane`; the CPU attention service's side is `Segment` and the functions of `messages`.
"""

from svc_common.tensor_plane._plane import Outcome
from svc_common.tensor_plane.errors import PeerLostError, PlaneError, PlaneTimeoutError
from svc_common.tensor_plane.messages import CpuSubBatch, EventKind, LayerBatch, Report, WorkEvent
from svc_common.tensor_plane.plane import TensorPlane
from svc_common.tensor_plane.segment import Segment, remove_stale_segments
from svc_common.tensor_plane.shape import RegionShape

__all__ = [
    "CpuSubBatch",
    "EventKind",
    "LayerBatch",
    "Outcome",
    "PeerLostError",
    "PlaneError",
    "PlaneTimeoutError",
    "RegionShape",
    "Report",
    "Segment",
    "TensorPlane",
    "WorkEvent",
    "remove_stale_segments",
]
