import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cpu_attention import Service


@pytest.fixture
def start_service() -> Iterator[Callable[..., Service]]:
    with tempfile.TemporaryDirectory(prefix="cpu-attn-") as directory:
        started: list[Service] = []

        def start(drain_s: int = 0, **cpu_attn: object) -> Service:
            started.append(Service(Path(directory), drain_s, **cpu_attn))
            return started[-1]

        yield start
        for service in started:
            service.end()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """One for all tests of a module: each opens a region of its own."""
    with tempfile.TemporaryDirectory(prefix="cpu-attn-") as directory:
        service = Service(Path(directory)).wait_ready()
        yield service
        service.end()
