"""Makes the executor's decoder: as many layers as fit lie on the device, the others are streamed from a layer file."""

from collections.abc import Callable
from functools import partial

import torch

from gpu_svc.budget import Budget
from gpu_svc.cpu_layers import CpuLayers
from gpu_svc.device_kernels import decoder_ops
from gpu_svc.link import Link
from gpu_svc.placed_decoder import PlacedDecoder
from gpu_svc.torch_layers import TorchLayers
from svc_common.cpu_kernels import weight_memory
from svc_common.decoder.checkpoint import Checkpoint
from svc_common.decoder.cpu_decoder import CpuDecoder
from svc_common.decoder.layer_file import LayerFile
from svc_common.decoder.layer_writer import open_layer_file
from svc_common.decoder.load import Loader, load_decoder
from svc_common.decoder.torch_decoder import TorchDecoder
from svc_common.model.spec import ModelSpec
from svc_common.model.store import ModelFiles


def load_for_device(
    files: ModelFiles,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    budget: Budget,
    link: Link,
) -> PlacedDecoder:
    """With the memory that `budget` leaves to weights. Where all layers fit, no layer file is needed or written.

    Raises ConfigError where not even streaming leaves room, LayerFileError and CheckpointError.
    """
    on_cpu = device.type == "cpu"
    empty = CpuDecoder(spec, dtype)
    memory = budget.divided(
        empty.layer_bytes,
        empty.vocabulary_bytes + 4 * spec.position_parameters if on_cpu else _vocabulary_bytes(spec, dtype.itemsize),
        num_stagings=0 if on_cpu else 1,
    )
    all_fit = memory.most_resident() == spec.num_layers
    open_file: Callable[[], LayerFile] = partial(open_layer_file, files, spec, checkpoint, dtype)
    if not on_cpu:
        loader = Loader(checkpoint, spec, dtype, device)
        on_device = TorchDecoder(spec, loader.weights(with_layers=all_fit), decoder_ops(device))
        return PlacedDecoder(TorchLayers(on_device, empty, open_file, link), memory)
    if all_fit:
        decoder = load_decoder(checkpoint, spec, dtype, device)
        assert isinstance(decoder, CpuDecoder)
    else:
        file = open_file()
        decoder, open_file = _with_vocabulary(empty, file), lambda: file
    return PlacedDecoder(CpuLayers(decoder, open_file, link), memory)


def _vocabulary_bytes(spec: ModelSpec, dtype_bytes: int) -> int:
    """Of all that is in no layer, as a GPU keeps it."""
    return spec.weight_bytes(dtype_bytes) - sum(spec.layer_bytes(i, dtype_bytes) for i in range(spec.num_layers))


def _with_vocabulary(decoder: CpuDecoder, file: LayerFile) -> CpuDecoder:
    memory = weight_memory(decoder.vocabulary_bytes)
    memory[:] = file.vocabulary
    decoder.bind_vocabulary(memory, file.positions())
    return decoder
