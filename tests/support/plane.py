"""A small region, and processes that hold one side of it until they are killed."""

import subprocess
import sys
from dataclasses import asdict

from svc_common.tensor_plane import RegionShape, Segment, TensorPlane

SHAPE = RegionShape(
    num_layers=3,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=40,
    block_tokens=8,
    kv_dtype="fp16",
    exchange_dtype="fp32",
    max_sequences=5,
    softmax_scale=0.25,
)
POOL_BYTES = 300_000
EPOCH = 41

# The other side: an owner that makes a segment, or an executor that attaches to one. Says so, then waits to be killed.
PEER = """
import sys, time
from pathlib import Path
from svc_common.tensor_plane import RegionShape, Segment, TensorPlane
shape = RegionShape(**eval(sys.argv[2]))
if sys.argv[1] == "owner":
    held = Segment.create(Path(sys.argv[3]), int(sys.argv[4]), shape, int(sys.argv[5]))
    print(held.path, held.endpoint, flush=True)
else:
    held = TensorPlane.attach(sys.argv[3], sys.argv[4], int(sys.argv[5]), shape)
    print("attached", flush=True)
time.sleep(600)
"""


class Peer:
    """A process that holds one side until it is killed."""

    def __init__(self, role: str, *arguments: object) -> None:
        command = [sys.executable, "-c", PEER, role, repr(asdict(SHAPE)), *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline().split()

    def kill(self) -> None:
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def attach(segment: Segment, epoch: int = EPOCH, shape: RegionShape = SHAPE) -> TensorPlane:
    return TensorPlane.attach(segment.path, segment.endpoint, epoch, shape)
