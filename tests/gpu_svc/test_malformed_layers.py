"""Batches for the CPU layers with numbers that make no sense, sent to the service's own code over its socket."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.gpu import BLOCK_TOKENS, LIMITS, load_decoder

from cpu_attn_svc.host import AttentionHost, WantedLayers
from gpu_svc.cpu_attention_client import region_shape
from gpu_svc.kv_cache import KvShape
from svc_common.config import CpuAttnConfig
from svc_common.decoder.dtypes import dtype_name
from svc_common.model.store import ModelFiles
from svc_common.policy import ExecutionPolicy
from svc_common.tensor_plane import LayerBatch, PeerLostError, PlaneError, PlaneTimeoutError, TensorPlane

ODD = (-(2**31), -1, 0, 2**31 - 1)
NUM_BLOCKS = 12


def test_they_are_refused_or_computed(
    checkpoint: Callable[[str], ModelFiles], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Always answered, by the same service; numbers that fit are computed in between."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = checkpoint("qwen2")
    decoder = load_decoder(files)
    policy = ExecutionPolicy(decoder.spec.num_layers - 1, 1, 2)
    shape = region_shape(decoder, KvShape.of(decoder.spec, BLOCK_TOKENS, decoder.dtype), LIMITS, policy, NUM_BLOCKS)
    config = CpuAttnConfig(kv_bytes=2**20, num_threads=1, segment_dir=tmp_path)
    host = AttentionHost(config, "cpu_attn", 1, [], str(files.directory))
    opened = host.open_region(1, shape, WantedLayers(dtype_name(decoder.weight_dtype), decoder.spec.digest))
    plane = TensorPlane.attach(opened.path, opened.endpoint, 1, shape)
    random = np.random.default_rng(5)
    num_computed = num_refused = 0
    try:
        for iteration in range(1, 400):
            plane.begin(iteration, [], 0, layer_batches=[_batch(random)])
            plane.submit_layers()
            try:
                plane.finish(60)
                num_computed += 1
            except (PeerLostError, PlaneTimeoutError):
                raise
            except PlaneError:
                num_refused += 1
    finally:
        plane.close()
        host.close_region()
    assert num_computed > 50
    assert num_refused > 50


def _batch(random: np.random.Generator) -> LayerBatch:
    def numbers(least: int, most: int, *shape: int) -> np.ndarray:  # type: ignore[type-arg]
        """Sensible ones, and now and then one that is not."""
        array = random.integers(least, most + 1, shape)
        return np.where(random.random(shape) < 0.04, random.choice(ODD, shape), array).astype(np.int32)

    chunks, decodes, stride = random.integers(0, 3), random.integers(0, 3), random.integers(1, 4)
    return LayerBatch(
        first_row=int(numbers(0, 4)),
        num_layers=int(numbers(1, 2)),
        chunk_starts=numbers(0, BLOCK_TOKENS, chunks),
        chunk_tokens=numbers(1, BLOCK_TOKENS, chunks),
        context_tokens=numbers(1, BLOCK_TOKENS, decodes),
        block_tables=numbers(0, NUM_BLOCKS - 1, chunks + decodes, stride),
    )
