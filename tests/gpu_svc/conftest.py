"""Checkpoints, executors and drivers for the tests of gpu_svc; what they are made of is in support/gpu.py."""

from collections.abc import Callable, Iterator

import pytest
from support.gpu import BLOCK_TOKENS, LIMITS, Driver, save_checkpoint
from support.reference import Reference

from gpu_svc.executor import Executor
from gpu_svc.host_tier import HostTier
from gpu_svc.kv_cache import KvShape
from gpu_svc.model.decoder import Decoder
from gpu_svc.plan import Limits
from svc_common.model.store import ModelFiles, resolve

MakeDriver = Callable[..., Driver]


@pytest.fixture
def make_driver() -> Iterator[MakeDriver]:
    """Drivers whose executors are closed at the end."""
    made: list[Driver] = []

    def make(
        decoder: Decoder,
        num_gpu_blocks: int = 200,
        host: HostTier | None = None,
        block_tokens: int = BLOCK_TOKENS,
        limits: Limits = LIMITS,
    ) -> Driver:
        shape = KvShape.of(decoder.spec, block_tokens, decoder.dtype)
        driver = Driver(Executor(decoder, shape, num_gpu_blocks * shape.block_bytes), host, limits)
        made.append(driver)
        return driver

    yield make
    for driver in made:
        driver.executor.close_epoch()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelFiles]:
    """A variant's files; each is written once."""
    written: dict[str, ModelFiles] = {}

    def get(variant: str) -> ModelFiles:
        if variant not in written:
            written[variant] = save_checkpoint(variant, tmp_path_factory.mktemp(variant))
        return written[variant]

    return get


@pytest.fixture(scope="session")
def default_model() -> ModelFiles:
    return resolve("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], ModelFiles]) -> Callable[[str], Reference]:
    """transformers on a variant's files."""
    return lambda variant: Reference(checkpoint(variant))
