"""google.protobuf.Duration as seconds."""

import math

from google.protobuf.duration_pb2 import Duration


def seconds_of(duration: Duration) -> float:
    return math.fsum((duration.seconds, duration.nanos * 1e-9))
