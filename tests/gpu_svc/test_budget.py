"""How memory is divided once the largest batch was measured; the measurement itself needs a GPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.gpu import LIMITS, load_placed

from gpu_svc.activations import FIXED_BYTES, Activations
from gpu_svc.budget import Budget, make_budget, measure_activations
from gpu_svc.device_memory import DeviceMemory
from gpu_svc.kv_cache import KvShape
from gpu_svc.limits import Limits
from gpu_svc.placed_decoder import PlacedDecoder
from svc_common.config import Config, ConfigError, parse
from svc_common.model.store import ModelFiles

MIB = 2**20
MEMORY = DeviceMemory(
    memory_bytes=100 * MIB,
    layer_bytes=(5 * MIB,) * 8,
    other_bytes=6 * MIB,
    kv_bytes=20 * MIB,
    num_stagings=1,
    activation_bytes=14 * MIB,
    graph_bytes=10 * MIB,
    spare_bytes=3 * MIB,
)


def test_all_parts_share_one_memory() -> None:
    assert MEMORY.free_bytes(8) == (100 - 40 - 6 - 20 - 14 - 10 - 3) * MIB
    assert MEMORY.most_resident() == 8
    assert MEMORY.text() == (
        "device memory 100.0 MiB: weights 46.0 MiB | buffers for streamed weights 0 B | graphs 10.0 MiB | "
        "activations 14.0 MiB | KV 20.0 MiB | free 10.0 MiB"
    )
    for name in ("activation_bytes", "graph_bytes", "spare_bytes", "kv_bytes"):
        # One byte more than what is free: a layer less, and then three buffers of one.
        more = replace(MEMORY, **{name: getattr(MEMORY, name) + 7 * MIB + 1})
        assert (more.most_resident(), more.free_bytes(5)) == (4, -1 + 0 * MIB)


def test_kv_in_all_that_is_left() -> None:
    assert MEMORY.filled(MIB).kv_bytes == 27 * MIB
    assert MEMORY.filled(27 * MIB).kv_bytes == 27 * MIB
    # Where not all layers leave so much, as many as do; a layer's buffers take three layers' room.
    assert MEMORY.filled(27 * MIB + 1).kv_bytes == 32 * MIB
    assert MEMORY.filled(27 * MIB + 1).most_resident() == 4


def activations_of(decoder: PlacedDecoder) -> Activations:
    return Activations(decoder.spec, decoder.device, decoder.weight_dtype, None)


@pytest.fixture
def decoder(checkpoint: Callable[[str], ModelFiles], tmp_path: Path) -> PlacedDecoder:
    return load_placed(checkpoint("llama-deep"), tmp_path)


def budget_of(decoder: PlacedDecoder, kv_bytes: int | None, memory_bytes: int) -> Budget:
    bare = decoder.memory
    budget = Budget(memory_bytes, kv_bytes, 4096, activation_bytes=200 * MIB)
    decoder.memory = budget.divided(bare.layer_bytes, bare.other_bytes, bare.num_stagings)
    return budget


def test_what_was_measured_takes_the_place_of_the_bound(
    decoder: PlacedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And KV takes what that leaves."""
    shape = KvShape.of(decoder.spec, 16, torch.float32)
    budget = budget_of(decoder, None, 400 * MIB)
    before = decoder.memory
    asked: list[tuple[int, Limits]] = []

    def measured(measured_with: PlacedDecoder, of_shape: KvShape, limits: Limits) -> int:
        assert of_shape == shape
        asked.append((measured_with.weight_bytes, limits))
        return 150 * MIB

    monkeypatch.setattr("gpu_svc.budget.measured_bytes", measured)
    measure_activations(budget, decoder, shape, activations_of(decoder), LIMITS)
    assert asked == [(before.weight_bytes(7), LIMITS)]
    assert decoder.memory == replace(before, activation_bytes=150 * MIB, kv_bytes=before.kv_bytes + 50 * MIB)
    monkeypatch.setattr("gpu_svc.budget.measured_bytes", lambda *args: 1)
    measure_activations(budget, decoder, shape, activations_of(decoder), LIMITS)
    assert decoder.memory.activation_bytes == FIXED_BYTES["cuda"]
    decoder.close()


def test_a_batch_that_does_not_fit_is_refused_at_the_start(
    decoder: PlacedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = KvShape.of(decoder.spec, 16, torch.float32)
    budget = budget_of(decoder, 10 * MIB, 300 * MIB)
    monkeypatch.setattr("gpu_svc.budget.measured_bytes", lambda *args: 300 * MIB)
    with pytest.raises(ConfigError, match=rf"activations of the largest batch {300 * MIB}, KV {10 * MIB},"):
        measure_activations(budget, decoder, shape, activations_of(decoder), LIMITS)

    def out_of_memory(*args: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("gpu_svc.budget.measured_bytes", out_of_memory)
    with pytest.raises(ConfigError, match=r"planner.max_batch_tokens 256 .* does not fit .*CUDA out of memory"):
        measure_activations(budget, decoder, shape, activations_of(decoder), LIMITS)
    decoder.close()


@pytest.mark.parametrize(
    ("gpu", "free_bytes", "expected"),
    [
        ({"kv_bytes": "auto"}, 320 * MIB, (320 * MIB, None, 10 * MIB)),
        ({"kv_bytes": "64MiB"}, 320 * MIB, (320 * MIB, 64 * MIB, 10 * MIB)),
        ({"kv_bytes": "64MiB", "memory_bytes": "256MiB"}, 320 * MIB, (256 * MIB, 64 * MIB, 8 * MIB)),
    ],
)
def test_on_a_gpu_the_budget_is_what_is_free(
    gpu: dict[str, object],
    free_bytes: int,
    expected: tuple[int, int | None, int],
    decoder: PlacedDecoder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cap is also told to torch's allocator, as a share of what the whole GPU has; a part stays free."""
    shares: list[tuple[float, int]] = []
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free_bytes, 1024 * MIB))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr(
        "torch.cuda.set_per_process_memory_fraction", lambda share, index: shares.append((share, index))
    )
    properties = type("Properties", (), {"total_memory": 1024 * MIB})
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)

    def budget(config: Config) -> Budget:
        shape = KvShape.of(decoder.spec, 16, torch.float32)
        return make_budget(config, torch.device("cuda"), shape, activations_of(decoder), LIMITS)

    made = budget(parse({"gpu": gpu}, "test"))
    assert (made.memory_bytes, made.kv_bytes, made.spare_bytes) == expected
    assert made.least_kv_bytes == 16 * KvShape.of(decoder.spec, 16, torch.float32).block_bytes
    assert shares == ([(0.25, 3)] if "memory_bytes" in gpu else [])
    with pytest.raises(ConfigError, match=f"gpu.memory_bytes is {2**30} bytes, there are {320 * MIB} bytes"):
        budget(parse({"gpu": {"memory_bytes": "1GiB"}}, "test"))
    decoder.close()
