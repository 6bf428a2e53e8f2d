"""What the configuration says of the device's memory, and how it is divided once a model's sizes are known."""

import logging
from dataclasses import dataclass, replace

import torch

from gpu_svc.activations import FIXED_BYTES, Activations
from gpu_svc.device_memory import DeviceMemory, DoesNotFitError
from gpu_svc.graph_options import graph_bytes
from gpu_svc.kv_cache import KvShape
from gpu_svc.largest_batch import measured_bytes
from gpu_svc.limits import Limits
from gpu_svc.placed_decoder import PlacedDecoder
from svc_common.config import Config, ConfigError
from svc_common.memory import check_fits_memory, usable_memory_bytes
from svc_common.model.spec import ModelSpec

_SPARE_SHARE = 32
"""One part of so many stays free on a GPU, and wherever KV takes all that is left."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Budget:
    """One device's memory for one model."""

    memory_bytes: int
    kv_bytes: int | None
    """None: all that is left."""
    least_kv_bytes: int
    """Where it is all that is left: of the tokens of one iteration, that it has room for them."""
    activation_bytes: int
    """At most, by shapes."""
    graph_bytes: int = 0
    """Of captured iterations and their buffers, a scratch block of KV among them."""
    spare_bytes: int = 0

    def divided(self, layer_bytes: tuple[int, ...], other_bytes: int, num_stagings: int) -> DeviceMemory:
        """Arguments as of DeviceMemory. Raises ConfigError where not even streaming leaves room."""
        memory = DeviceMemory(
            self.memory_bytes,
            layer_bytes,
            other_bytes,
            self.kv_bytes or 0,
            num_stagings,
            self.activation_bytes,
            self.graph_bytes,
            self.spare_bytes,
        )
        return self.with_kv(memory)

    def with_kv(self, memory: DeviceMemory) -> DeviceMemory:
        """With the cache as large as was asked for. Raises ConfigError where not even streaming leaves room for it."""
        try:
            if self.kv_bytes is None:
                return memory.filled(self.least_kv_bytes)
            memory.most_resident()
        except DoesNotFitError as error:
            raise ConfigError(f"the model does not fit: {error}") from error
        return memory


def make_budget(
    config: Config, device: torch.device, shape: KvShape, activations: Activations, limits: Limits
) -> Budget:
    """Raises ConfigError for what the device can't have."""
    cuda, kv_bytes = device.type == "cuda", config.gpu.kv_bytes
    if kv_bytes == "auto" and not cuda and config.gpu.memory_bytes is None:
        raise ConfigError(
            'gpu.kv_bytes "auto" on device "cpu" needs gpu.memory_bytes: all else on this machine shares its memory'
        )
    memory_bytes = _memory_bytes(config, device)
    check_kv_sizes(config, shape.block_bytes, shape.host_block_bytes, memory_bytes)
    return Budget(
        memory_bytes=memory_bytes,
        kv_bytes=None if kv_bytes == "auto" else int(kv_bytes),
        least_kv_bytes=-(-limits.max_batch_tokens // shape.block_tokens) * shape.block_bytes,
        activation_bytes=activations.num_bytes(limits),
        graph_bytes=graph_bytes(config.gpu.graph_bytes, device, memory_bytes),
        spare_bytes=memory_bytes // _SPARE_SHARE if cuda or kv_bytes == "auto" else 0,
    )


def measure_activations(
    budget: Budget, decoder: PlacedDecoder, shape: KvShape, activations: Activations, limits: Limits
) -> None:
    """On a CUDA device: divides the memory anew by what the largest batch takes there, and by what its shapes say of
    prompts whose past is not in the cache of that batch.

    Raises ConfigError where it does not fit, LayerFileError and CheckpointError.
    """
    memory = decoder.memory
    resident = memory.most_resident()
    decoder.place(range(memory.num_layers - resident), resident)
    try:
        measured = measured_bytes(decoder, shape, limits)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the largest batch, of planner.max_batch_tokens {limits.max_batch_tokens} and "
            f"planner.max_running_sequences {limits.max_sequences}, does not fit beside the model: {error}"
        ) from error
    num_bytes = max(measured, FIXED_BYTES["cuda"]) + activations.chunk_bytes(limits)
    logger.info("activations take %d bytes, %d as measured; %d by shapes", num_bytes, measured, memory.activation_bytes)
    decoder.memory = budget.with_kv(replace(memory, activation_bytes=num_bytes))


def check_kv_sizes(config: Config, block_bytes: int, host_block_bytes: int, memory_bytes: int) -> None:
    """Raises ConfigError where a tier was asked for that can't hold a single block, or more than the device has."""
    gpu_kv_bytes = 0 if config.gpu.kv_bytes == "auto" else int(config.gpu.kv_bytes)
    pools = (
        (f"{config.cpu_attn_key(index)}.kv_bytes", service.kv_bytes, host_block_bytes)
        for index, service in enumerate(config.cpu_attn)
    )
    for key, kv_bytes, least_bytes in (("gpu.kv_bytes", gpu_kv_bytes, block_bytes), *pools):
        if 0 < kv_bytes < least_bytes:
            raise ConfigError(
                f"{key} is {kv_bytes} bytes, a KV block of kv.block_tokens = {config.kv.block_tokens} tokens takes "
                f"{least_bytes}: give it more, or 0 for none"
            )
    check_fits_memory("gpu.kv_bytes", gpu_kv_bytes, memory_bytes)


def _memory_bytes(config: Config, device: torch.device) -> int:
    """What is free on the device, or less where the configuration caps it. Raises ConfigError for a cap above that."""
    cuda = device.type == "cuda"
    here = torch.cuda.mem_get_info(device)[0] if cuda else usable_memory_bytes()
    if config.gpu.memory_bytes is None:
        return here
    check_fits_memory("gpu.memory_bytes", config.gpu.memory_bytes, here)
    if cuda:  # So that the cap holds, whatever was counted.
        total = torch.cuda.get_device_properties(device).total_memory
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_per_process_memory_fraction(config.gpu.memory_bytes / total, index)
    return config.gpu.memory_bytes


def epoch_limits(config: Config, spec: ModelSpec) -> Limits:
    """That a planner with the same configuration keeps to."""
    planner = config.planner
    longest = min(planner.max_sequence_tokens or spec.context_tokens, spec.context_tokens)
    return Limits(planner.max_running_sequences, planner.max_batch_tokens, longest)
