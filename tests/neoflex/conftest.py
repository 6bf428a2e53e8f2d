"""One scripted server for the tests of the client and the command."""

from collections.abc import Iterator

import pytest
from support.inference import InferenceServer, inference_server


@pytest.fixture(scope="session")
def server() -> Iterator[InferenceServer]:
    with inference_server() as running:
        yield running
