import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.plane import EPOCH, POOL_BYTES, SHAPE

from svc_common.tensor_plane import Segment


@pytest.fixture
def segment_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="plane-") as directory:
        yield Path(directory)


@pytest.fixture
def segment(segment_dir: Path) -> Iterator[Segment]:
    segment = Segment.create(segment_dir, EPOCH, SHAPE, POOL_BYTES)
    yield segment
    segment.close()
