"""Finds a model's layer file, and writes it where there is none that can be used."""

import errno
import hashlib
import json
import logging
import mmap
import os
import re
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from svc_common.decoder.checkpoint import Checkpoint
from svc_common.decoder.cpu_decoder import CpuDecoder
from svc_common.decoder.dtypes import dtype_name
from svc_common.decoder.dummy import DUMMY_VERSION
from svc_common.decoder.layer_file import (
    PAGE_BYTES,
    SPEC,
    VERSION,
    LayerFile,
    LayerFileError,
    Part,
    crc32_of,
    header_bytes,
)
from svc_common.decoder.load import Loader
from svc_common.decoder.packing import Bytes
from svc_common.memory import give_back_freed
from svc_common.model.layer_cache import PART_SUFFIX, SUFFIX, layers_dir, locked, note_use
from svc_common.model.spec import ModelSpec
from svc_common.model.store import ModelFiles
from svc_common.progress import Progress

_DIGEST_CHARS = 24
_CPU = torch.device("cpu")

logger = logging.getLogger(__name__)


def open_layer_file(
    files: ModelFiles,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    directory: Path | None = None,
    instruction_set: str = "auto",
) -> LayerFile:
    """The model's weights in `dtype`, packed for this processor, from `directory`, or from the user's cache directory.

    A file of the same model that is whole is taken as it is; else it is written, which reads the checkpoint once. Other
    processes that want the same file meanwhile wait for it. Peak memory beside the page cache is one layer, or the
    vocabulary, in fp32, and one tensor of the checkpoint. Raises LayerFileError, CheckpointError, and
    ModelNotFoundError where the user has no cache directory.
    """
    directory = directory or layers_dir()
    decoder = CpuDecoder(spec, dtype, instruction_set)
    source = _identity(files)
    path = directory / _file_name(files.name, source, decoder)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(directory))
        except OSError as error:
            raise LayerFileError(f"{directory} cannot be used: {error.strerror}") from error
        return _checked_or_written(path, source, decoder, Loader(checkpoint, spec, torch.float32, _CPU))


def _checked_or_written(path: Path, source: Any, decoder: CpuDecoder, loader: Loader) -> LayerFile:
    """Raises LayerFileError and CheckpointError."""
    try:
        file = _checked(path, source)
        note_use(path)
        return file
    except FileNotFoundError:
        pass
    except LayerFileError as error:
        logger.warning("%s; it is written anew", error)
    _write(path, source, decoder, loader)
    give_back_freed()
    return LayerFile(path)


def _identity(files: ModelFiles) -> list[list[Any]]:
    """Of the files that weights come from: what changes when they do, and can be read without reading them."""
    if files.is_dummy:
        return [["dummy", DUMMY_VERSION]]
    paths = [files.gguf] if files.gguf else sorted([*files.directory.glob("*.safetensors")])
    stats = [(path.name, path.stat()) for path in paths]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _file_name(model: str, source: Any, decoder: CpuDecoder) -> str:
    dtype = dtype_name(decoder.weight_dtype)
    facts = [VERSION, source, SPEC.dump_python(decoder.spec, mode="json"), dtype, decoder.packing]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', model)}-{dtype}-{digest}{SUFFIX}"


def _checked(path: Path, source: Any) -> LayerFile:
    """The file there, every byte of it. Raises LayerFileError or FileNotFoundError."""
    try:
        file = LayerFile(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LayerFileError(f"{path} cannot be read: {error.strerror}") from error
    if file.source != source:
        raise LayerFileError(f"{path} is of another model")
    file.verify()
    return file


def _write(path: Path, source: Any, decoder: CpuDecoder, loader: Loader) -> None:
    for abandoned in path.parent.glob(f"*{PART_SUFFIX}"):  # Nobody else writes while the lock is held.
        abandoned.unlink()
    parts = _parts(source, decoder)
    total = parts[-1].offset + parts[-1].num_bytes
    _check_room(path.parent, total)
    started_s = time.monotonic()
    logger.info("packing the weights once, %d bytes, into %s", total, path)
    try:
        descriptor, part_path = _part_file(path.parent)
        try:
            os.posix_fallocate(descriptor, 0, total)  # A mapped file must not run out of disk.
            _fill(descriptor, total, parts, source, decoder, loader)
            os.fsync(descriptor)
            if part_path is None:
                part_path = path.with_suffix(PART_SUFFIX)  # A link can't replace a file that is damaged, a rename can.
                os.link(f"/proc/self/fd/{descriptor}", part_path, src_dir_fd=descriptor, follow_symlinks=True)
            os.replace(part_path, path)  # Others see a whole file or none.
        except BaseException:
            if part_path is not None:
                part_path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise LayerFileError(f"{path} cannot be written: {error.strerror}") from error
    logger.info("packed in %.1f s", time.monotonic() - started_s)


def _part_file(directory: Path) -> tuple[int, Path | None]:
    """A new file's descriptor, and its name. It has none where the file system allows that: its room is then free again
    however the process ends, also where it is stopped or killed in the minutes that packing may take.
    """
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600), None
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    descriptor, name = tempfile.mkstemp(dir=directory, suffix=PART_SUFFIX)
    return descriptor, Path(name)


def _check_room(directory: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        raise LayerFileError(
            f"{directory} has {free} bytes left, the packed weights take {num_bytes}: make room, or set XDG_CACHE_HOME "
            "to a directory with more"
        )


def _parts(source: Any, decoder: CpuDecoder) -> list[Part]:
    """All of the file's, without their CRCs."""
    spec = decoder.spec
    sizes = {"vocabulary": decoder.vocabulary_bytes}
    if spec.position_parameters:
        sizes["positions"] = 4 * spec.position_parameters
    sizes |= {f"layer.{index}": num_bytes for index, num_bytes in enumerate(decoder.layer_bytes)}

    def placed(offset: int) -> list[Part]:
        parts = []
        for name, num_bytes in sizes.items():
            offset = -(-offset // PAGE_BYTES) * PAGE_BYTES
            parts.append(Part(name, offset, num_bytes, 0))
            offset += num_bytes
        return parts

    # The header holds offsets, whose digits take room: twice what it takes with the least of them is enough.
    return placed(2 * len(header_bytes(source, spec, dtype_name(decoder.weight_dtype), decoder.packing, placed(0))))


def _fill(descriptor: int, total: int, parts: list[Part], source: Any, decoder: CpuDecoder, loader: Loader) -> None:
    """Packs each part where it lies in the file, then writes the header."""
    spec = decoder.spec
    with mmap.mmap(descriptor, total, mmap.MAP_SHARED) as mapped:
        whole = np.frombuffer(mapped, np.uint8)
        progress, done = Progress(logger, "packing weights", total), []
        for part in parts:
            memory = whole[part.offset : part.offset + part.num_bytes]
            _pack(part.name, decoder, loader, memory)
            done.append(replace(part, crc32=crc32_of(memory)))
            progress.reached(part.offset + part.num_bytes)
        header = header_bytes(source, spec, dtype_name(decoder.weight_dtype), decoder.packing, done)
        assert len(header) <= parts[0].offset
        whole[: len(header)] = np.frombuffer(header, np.uint8)
        del memory, whole  # The mapping ends only without a view of it.
        mapped.flush()


def _pack(name: str, decoder: CpuDecoder, loader: Loader, memory: Bytes) -> None:
    if name == "vocabulary":
        head = None if decoder.spec.tie_embeddings else loader.head()
        decoder.pack_vocabulary(loader.embedding(), head, loader.final_norm(), memory)
    elif name == "positions":
        positions = loader.positions()
        assert positions is not None
        memory.view(np.float32)[:] = positions.flatten().numpy()
    else:
        index = int(name.removeprefix("layer."))
        decoder.pack_layer(index, loader.layer(index), memory)
