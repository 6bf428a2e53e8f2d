"""Makes the executor's decoder: as many layers as fit lie on the device, the others are streamed from a layer file."""

import logging
from collections.abc import Callable
from functools import partial

import torch

from gpu_svc.cpu_layers import CpuLayers
from gpu_svc.device_memory import DeviceMemory, DoesNotFitError
from gpu_svc.link import Link
from gpu_svc.placed_decoder import PlacedDecoder
from svc_common.config import ConfigError
from svc_common.cpu_kernels import weight_memory
from svc_common.decoder.checkpoint import Checkpoint
from svc_common.decoder.cpu_decoder import CpuDecoder
from svc_common.decoder.decoder import Decoder
from svc_common.decoder.layer_file import LayerFile
from svc_common.decoder.layer_writer import open_layer_file
from svc_common.decoder.load import load_decoder
from svc_common.model.spec import ModelSpec
from svc_common.model.store import ModelFiles

logger = logging.getLogger(__name__)


def load_for_device(
    files: ModelFiles,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    memory_bytes: int,
    kv_bytes: int,
    link: Link,
) -> Decoder:
    """Weights and `kv_bytes` of KV share `memory_bytes`. Where all layers fit, no layer file is needed or written.

    Raises ConfigError where not even streaming leaves room, LayerFileError and CheckpointError.
    """
    if device.type != "cpu":
        check_weights_fit(files.name, spec.weight_bytes(dtype.itemsize) + kv_bytes, memory_bytes)
        return load_decoder(checkpoint, spec, dtype, device)
    empty = CpuDecoder(spec, dtype)
    memory = DeviceMemory(
        memory_bytes, empty.layer_bytes, empty.vocabulary_bytes + 4 * spec.position_parameters, kv_bytes
    )
    try:
        resident = memory.most_resident()
    except DoesNotFitError as error:
        raise ConfigError(f"model.source {files.name}: {error}") from error
    open_file: Callable[[], LayerFile] = partial(open_layer_file, files, spec, checkpoint, dtype)
    if resident == spec.num_layers:
        decoder = load_decoder(checkpoint, spec, dtype, device)
        assert isinstance(decoder, CpuDecoder)
    else:
        file = open_file()
        decoder, open_file = _with_vocabulary(empty, file), lambda: file
    return PlacedDecoder(CpuLayers(decoder, open_file, link), memory)


def check_weights_fit(name: str, num_bytes: int, memory_bytes: int) -> None:
    """Raises ConfigError before anything is loaded that the device can't hold."""
    if num_bytes > memory_bytes:
        raise ConfigError(
            f"model.source {name}: its weights and gpu.kv_bytes take {num_bytes} bytes, the device has {memory_bytes}"
        )


def _with_vocabulary(decoder: CpuDecoder, file: LayerFile) -> CpuDecoder:
    memory = weight_memory(decoder.vocabulary_bytes)
    memory[:] = file.vocabulary
    decoder.bind_vocabulary(memory, file.positions())
    return decoder
