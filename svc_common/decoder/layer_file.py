"""The weights of a model in one file, packed as the CPU computes with them, which several processes map at once.

    magic | version | length and CRC of the header | header, JSON | vocabulary | positions | layer 0 | layer 1 | ...

Parts begin at page boundaries. The header says of what model they are and how they are packed, and holds each one's
place and CRC. A file is written once, under another name until it is whole (layer_writer.py), and never changed.
"""

import json
import logging
import mmap
import struct
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from svc_common.cores import usable_cores
from svc_common.cpu_kernels import ThreadPool
from svc_common.decoder.cpu_decoder import CpuDecoder
from svc_common.decoder.dtypes import DTYPES
from svc_common.decoder.packing import Bytes
from svc_common.model.spec import ModelSpec
from svc_common.progress import Progress

MAGIC = b"NEOFLEXW"
VERSION = 1
"""Of the file's form and of what panels look like."""
PAGE_BYTES = 4096
PREFIX = struct.Struct("<8sIII")
"""Magic, version, length of the header, its CRC."""
_CRC_BYTES = 32 * 2**20

SPEC: TypeAdapter[ModelSpec] = TypeAdapter(ModelSpec)

logger = logging.getLogger(__name__)


class LayerFileError(Exception):
    """The file cannot be used, or cannot be had; the text names it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of bytes."""

    name: str
    """"vocabulary", "positions" or "layer.N"."""
    offset: int
    num_bytes: int
    crc32: int


class LayerFile:
    """A file that is mapped, to be read only; memory is that of the page cache, once for all who map it."""

    def __init__(self, path: Path) -> None:
        """Checks the header and the file's size. Raises LayerFileError, and FileNotFoundError."""
        self.path = path
        with path.open("rb") as file:
            header, data_start = _read_header(path, file.read(PREFIX.size), file.read)
            file.seek(0, 2)
            self.num_bytes = file.tell()
            self.source, self.spec, self.dtype, self.packing, parts = _parse(path, header)
            end = max((part.offset + part.num_bytes for part in parts), default=0)
            if end != self.num_bytes or any(part.offset < data_start for part in parts):
                raise LayerFileError(f"{path} has {self.num_bytes} bytes, its header wants {end}")
            mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        self._parts = {part.name: part for part in parts}
        wanted = {"vocabulary", *(f"layer.{index}" for index in range(self.spec.num_layers))}
        if wanted - self._parts.keys():
            raise LayerFileError(f"{path} lacks {', '.join(sorted(wanted - self._parts.keys()))}")
        self._bytes = np.frombuffer(mapped, np.uint8)
        self.layer_bytes = tuple(self._parts[f"layer.{index}"].num_bytes for index in range(self.spec.num_layers))

    @property
    def address(self) -> int:
        """Of the mapped file's first byte."""
        return self._bytes.ctypes.data

    def layer(self, index: int) -> Bytes:
        """One layer, packed; keeps the file mapped as long as it lives."""
        return self._view(self._parts[f"layer.{index}"])

    @property
    def vocabulary(self) -> Bytes:
        """Embedding, head and final norm, packed."""
        return self._view(self._parts["vocabulary"])

    def positions(self) -> Tensor | None:
        """A copy of the table of learned positions, where there is one: [rows, hidden_size], fp32."""
        part = self._parts.get("positions")
        if part is None:
            return None
        return torch.from_numpy(self._view(part).view(np.float32).copy()).view(-1, self.spec.hidden_size)

    def verify(self) -> None:
        """Reads every part. Raises LayerFileError naming the one that is not as it was written."""
        progress = Progress(logger, f"checking {self.path.name}", self.num_bytes)
        with ThreadPoolExecutor(usable_cores()) as pool:
            for part, crc in zip(self._parts.values(), pool.map(self._crc, self._parts.values()), strict=True):
                if crc != part.crc32:
                    raise LayerFileError(f"{self.path}: {part.name} is damaged")
                progress.reached(part.offset + part.num_bytes)

    def decoder(
        self,
        layers: Iterable[int],
        vocabulary: bool = False,
        instruction_set: str = "auto",
        threads: ThreadPool | None = None,
    ) -> CpuDecoder:
        """Computes with these layers, and with embedding and head if asked, where they lie in the file.

        `threads`: as of CpuDecoder. Raises LayerFileError where this processor wants them packed otherwise.
        """
        decoder = CpuDecoder(self.spec, DTYPES[self.dtype], instruction_set, threads)  # type: ignore[index]
        if decoder.packing != self.packing:
            raise LayerFileError(f"{self.path} holds {self.packing}, wanted are {decoder.packing}")
        for index in layers:
            decoder.bind_layer(index, self.layer(index))
        if vocabulary:
            decoder.bind_vocabulary(self.vocabulary, self.positions())
        return decoder

    def _view(self, part: Part) -> Bytes:
        return self._bytes[part.offset : part.offset + part.num_bytes]

    def _crc(self, part: Part) -> int:
        return crc32_of(self._view(part))


def crc32_of(data: Bytes) -> int:
    """In pieces, so that other threads get their turn."""
    crc = 0
    for start in range(0, len(data), _CRC_BYTES):
        crc = zlib.crc32(data[start : start + _CRC_BYTES].data, crc)
    return crc


def header_bytes(source: Any, spec: ModelSpec, dtype: str, packing: str, parts: Iterable[Part]) -> bytes:
    """What a file begins with; as long for one CRC as for another."""
    document = {
        "source": source,
        "spec": SPEC.dump_python(spec, mode="json"),
        "dtype": dtype,
        "packing": packing,
        "parts": [[part.name, part.offset, part.num_bytes, f"{part.crc32:08x}"] for part in parts],
    }
    text = json.dumps(document).encode()
    return PREFIX.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text


def _read_header(path: Path, prefix: bytes, read: Any) -> tuple[dict[str, Any], int]:
    """The header, and where it ends."""
    if len(prefix) < PREFIX.size or prefix[: len(MAGIC)] != MAGIC:
        raise LayerFileError(f"{path} is no file of layers")
    _, version, length, crc = PREFIX.unpack(prefix)
    if version != VERSION:
        raise LayerFileError(f"{path} has version {version}, wanted is {VERSION}")
    text = read(length)
    if len(text) < length or zlib.crc32(text) != crc:
        raise LayerFileError(f"{path}: the header is damaged")
    document: dict[str, Any] = json.loads(text)
    return document, PREFIX.size + length


def _parse(path: Path, header: dict[str, Any]) -> tuple[Any, ModelSpec, str, str, list[Part]]:
    try:
        parts = [Part(str(name), int(offset), int(size), int(crc, 16)) for name, offset, size, crc in header["parts"]]
        spec = SPEC.validate_python(header["spec"])
        return header["source"], spec, str(header["dtype"]), str(header["packing"]), parts
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise LayerFileError(f"{path}: the header cannot be read: {type(error).__name__}") from error
