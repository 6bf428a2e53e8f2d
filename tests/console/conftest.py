"""A real browser. `make console` says where it is to come from."""

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.chromium import Browser, chromium


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    # Not pytest's own directory: a browser that ends still writes there for a moment.
    with tempfile.TemporaryDirectory(prefix="nfx-chromium-", ignore_cleanup_errors=True) as profile:
        async with chromium(Path(profile)) as running:
            yield running
