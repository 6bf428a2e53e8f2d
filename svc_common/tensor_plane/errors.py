"""What can go wrong between the two sides of the tensor plane."""

from svc_common.tensor_plane._plane import PlaneError

__all__ = ["PeerLostError", "PlaneError", "PlaneTimeoutError"]


class PeerLostError(PlaneError):
    """The process on the other side has ended or has given the region up."""


class PlaneTimeoutError(PlaneError):
    """The other side lives but did not answer in time."""
