"""The services' log files: read as they grow, or from their end."""

from collections.abc import Iterator, Mapping
from pathlib import Path

_TAIL_BYTES = 16 * 2**10


class LogFollower:
    """Yields lines that were added to log files since the last look."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = dict(paths)
        self._offsets = {name: path.stat().st_size if path.exists() else 0 for name, path in paths.items()}

    @property
    def name_width(self) -> int:
        """Characters of the longest name."""
        return max(map(len, self._paths), default=0)

    def new_lines(self) -> Iterator[tuple[str, str]]:
        """(name, line) of each whole line, by file."""
        for name, path in self._paths.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._offsets[name])
                for line in file:
                    if not line.endswith(b"\n"):  # Still being written.
                        break
                    self._offsets[name] += len(line)
                    yield name, line.decode(errors="replace").rstrip()


def last_lines(path: Path, num_lines: int) -> list[str]:
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-num_lines:]
