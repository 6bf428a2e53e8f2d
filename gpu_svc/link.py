"""The link between host and device. On device "cpu" it is emulated: what crosses takes the time it would take there."""

import threading
import time
from collections.abc import Callable

_PIECE_BYTES = 2 * 2**20
"""Of a long transfer; between two of its pieces others get their turn."""


class Lane:
    """One direction. Transfers of all threads share its bandwidth."""

    def __init__(self, bytes_per_s: int) -> None:
        """0: as fast as copies go."""
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0  # when all that was begun has crossed

    def carry(self, num_bytes: int, copy: Callable[[slice], object]) -> None:
        """Has `copy` move each piece, a slice of the bytes, and returns when they would all have crossed the link."""
        requested_s = time.perf_counter()
        for start in range(0, num_bytes, _PIECE_BYTES):
            piece = slice(start, min(start + _PIECE_BYTES, num_bytes))
            self.pace(piece.stop - piece.start, requested_s, lambda piece=piece: copy(piece))  # type: ignore[misc]

    def pace(self, num_bytes: int, requested_s: float, copy: Callable[[], object]) -> None:
        """The same for bytes that move at once; `requested_s`: since when they could have, of perf_counter."""
        if not self.bytes_per_s:
            copy()
            return
        with self._lock:
            # Not from now on: what one piece has overslept the next makes up for.
            self._free_s = max(self._free_s, requested_s) + num_bytes / self.bytes_per_s
            end_s = self._free_s
        copy()
        if (left_s := end_s - time.perf_counter()) > 0:
            time.sleep(left_s)


class Link:
    """Both directions, which do not disturb each other."""

    def __init__(self, bytes_per_s: int = 0) -> None:
        self.to_device = Lane(bytes_per_s)
        self.to_host = Lane(bytes_per_s)
