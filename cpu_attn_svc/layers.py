"""The first layers of the model, mapped for the CPU; the only module here that imports torch, on demand."""

import logging

import numpy as np
import torch

from cpu_attn_svc import _attention
from cpu_attn_svc.host import LayersUnavailableError, WantedLayers
from svc_common.config.model import LoadFormat
from svc_common.cpu_kernels import ThreadPool
from svc_common.decoder.checkpoint import CheckpointError, open_model
from svc_common.decoder.cpu_decoder import CpuDecoder
from svc_common.decoder.dtypes import DTYPES
from svc_common.decoder.layer_file import LayerFileError
from svc_common.decoder.layer_writer import open_layer_file
from svc_common.decoder.rope import Rotaries, Rotation
from svc_common.model.shapes import find_model
from svc_common.model.spec import UnsupportedModelError
from svc_common.model.store import ModelNotFoundError
from svc_common.model.weight_types import WeightTypeName
from svc_common.tensor_plane import LayerBatch, Segment

logger = logging.getLogger(__name__)


class CpuLayers:
    """So many layers of one model, from the first on."""

    def __init__(self, decoder: CpuDecoder, num_layers: int, wanted: WantedLayers) -> None:
        """Use `load`."""
        self._decoder = decoder
        self._num_layers = num_layers
        self._wanted = wanted
        self._rotaries = Rotaries(decoder.spec, torch.device("cpu"))

    @classmethod
    def load(
        cls, source: str, load_format: LoadFormat, num_layers: int, wanted: WantedLayers, threads: ThreadPool
    ) -> "CpuLayers":
        """`source` and `load_format` as in [model] of the configuration. Raises LayersUnavailableError."""
        torch.set_num_threads(1)  # It only reads files; the pool computes.
        try:
            files = find_model(source, load_format)
            spec, checkpoint = open_model(files)
            if spec.digest != wanted.model_digest:
                raise LayersUnavailableError(
                    f"model.source {source} is another model than the executor's: digest {spec.digest}, "
                    f"not {wanted.model_digest}"
                )
            dtype: WeightTypeName = next(name for name in DTYPES if name == wanted.weight_dtype)
            # Mapped, so that what the executor streams or loads from the same file is no second copy.
            file = open_layer_file(files, spec, checkpoint, DTYPES[dtype])
            decoder = file.decoder(range(num_layers), threads=threads)
        except (ModelNotFoundError, UnsupportedModelError, CheckpointError, LayerFileError) as error:
            raise LayersUnavailableError(f"model.source {source}: {error}") from error
        logger.info("%d of %d layers in %s, %d bytes", num_layers, spec.num_layers, dtype, decoder.weight_bytes)
        return cls(decoder, num_layers, wanted)

    def has(self, num_layers: int, wanted: WantedLayers) -> bool:
        """Whether these are just those layers."""
        return self._num_layers == num_layers and self._wanted == wanted

    def runner(self, segment: Segment, instruction_set: str, threads: ThreadPool) -> _attention.LayerRunner:
        """Over a segment's region, which is of this model. Raises PlaneError."""
        kinds = self._rotaries.of_layer[: self._num_layers]
        return _attention.LayerRunner(segment.region, instruction_set, threads, self._decoder.native, kinds)

    def rotations(self, batch: LayerBatch) -> tuple[Rotation, ...]:
        """Of the batch's tokens, by kind of layer."""
        chunks = zip(batch.chunk_starts.tolist(), batch.chunk_tokens.tolist(), strict=True)
        positions = [np.arange(start, start + num, dtype=np.int64) for start, num in chunks]
        positions.append(batch.context_tokens.astype(np.int64) - 1)
        return self._rotaries.rotations(torch.from_numpy(np.concatenate(positions)), torch.float32)
