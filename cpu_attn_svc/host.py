"""The host tier as the servicer sees it: at most one open region, and the threads that compute over it."""

import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpu_attn_svc.session import RegionSession
from cpu_attn_svc.totals import Totals
from svc_common.config import ConfigError, CpuAttnConfig
from svc_common.config.model import LoadFormat
from svc_common.cpu_kernels import ThreadPool, choose_instruction_set
from svc_common.memory import check_fits_memory, huge_page_bytes, size_text, usable_memory_bytes
from svc_common.security.sockets import group_id
from svc_common.tensor_plane import RegionShape, Segment, remove_stale_segments

if TYPE_CHECKING:  # It needs torch, which takes memory and seconds.
    from cpu_attn_svc.layers import CpuLayers

logger = logging.getLogger(__name__)


class LayersUnavailableError(Exception):
    """The layers that the executor wants computed can't be; the text says why."""


@dataclass(frozen=True, slots=True)
class WantedLayers:
    """What the executor says of the CPU layers beside their number."""

    weight_dtype: str
    model_digest: str


@dataclass(frozen=True, slots=True)
class OpenedRegion:
    path: str
    region_bytes: int
    endpoint: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class HostStatus:
    epoch: int
    """0 where no region is open."""
    pool_bytes: int
    num_blocks: int
    blocks_used: int
    iterations: int
    huge_page_bytes: int
    """Of the region, as it was made."""


NO_REGION = HostStatus(epoch=0, pool_bytes=0, num_blocks=0, blocks_used=0, iterations=0, huge_page_bytes=0)


def _check_segment_dir(key: str, directory: Path, kv_bytes: int) -> None:
    """Raises ConfigError where no region of that size can ever lie there."""
    if not directory.is_dir():
        raise ConfigError(f"{key}.segment_dir: {directory} is no directory")
    try:
        with tempfile.TemporaryDirectory(prefix=".neoflex-", dir=directory):
            status = os.statvfs(directory)
    except OSError as error:
        raise ConfigError(f"{key}.segment_dir: nothing can be made in {directory}: {error.strerror}") from error
    total_bytes = status.f_frsize * status.f_blocks
    if kv_bytes > total_bytes:
        raise ConfigError(
            f"{key}.kv_bytes is {kv_bytes} bytes, {key}.segment_dir {directory} holds {total_bytes} in all"
        )


class AttentionHost:
    """Calls that change it must not overlap; `status` may be asked for at any time."""

    def __init__(
        self,
        config: CpuAttnConfig,
        key: str,
        usable_cores: int,
        cpus: list[int],
        model_source: str,
        load_format: LoadFormat = "auto",
    ) -> None:
        """`key`: how messages name the configuration's table. `cpus`: what the first threads are pinned to.

        Raises ConfigError where this can't be had on this machine. The model is not looked at before an executor asks
        for its layers.
        """
        if config.kv_bytes == 0:
            raise ConfigError(f"{key}.kv_bytes is 0: there is nothing to serve")
        try:
            self.instruction_set = choose_instruction_set(config.instruction_set)
        except ValueError as error:
            raise ConfigError(f"{key}.instruction_set: {error}") from error
        _check_segment_dir(key, config.segment_dir, config.kv_bytes)
        check_fits_memory(f"{key}.kv_bytes", config.kv_bytes, usable_memory_bytes())
        self.max_threads = min(config.max_threads or usable_cores, usable_cores)
        """Never more than there are cores: one thread too many costs more than it brings."""
        if config.num_threads > self.max_threads:
            logger.warning("%s.num_threads is %d, at most %d run here", key, config.num_threads, self.max_threads)
        self._threads = ThreadPool(min(config.num_threads, self.max_threads), cpus)
        group = config.segment_group
        self._group = None if group is None else group_id(f"{key}.segment_group", group)
        self._config = config
        self._cpus = cpus
        self._model_source, self._load_format = model_source, load_format
        self._layers: CpuLayers | None = None
        """Of the latest region; kept for a next one of the same."""
        self._session: RegionSession | None = None
        self.totals = Totals()
        """Of all regions."""
        self._huge_page_bytes = 0
        removed = remove_stale_segments(config.segment_dir)
        if removed:
            logger.info("removed %d stale segments from %s", removed, config.segment_dir)

    @property
    def num_threads(self) -> int:
        return self._threads.num_threads

    def set_threads(self, num_threads: int) -> None:
        """From the next iteration on. 1 to max_threads."""
        assert 1 <= num_threads <= self.max_threads
        self._threads.num_threads = num_threads

    def open_region(self, epoch: int, shape: RegionShape, wanted: WantedLayers | None = None) -> OpenedRegion:
        """Closes an earlier region first: there is memory for one. Takes as long as reserving the memory does, and
        loading the CPU layers, which `wanted` describes where the shape has some.

        Raises PlaneError where there is no room or kv_bytes holds no block of this shape, and LayersUnavailableError.
        """
        self.close_region()
        self._load_layers(shape.num_cpu_layers, wanted)
        kv_bytes = self._config.kv_bytes
        segment = Segment.create(self._config.segment_dir, epoch, shape, kv_bytes, self._cpus, self._group)
        self._huge_page_bytes = huge_page_bytes(segment.path)
        try:
            session = RegionSession(segment, self.instruction_set, self._threads, self.totals, self._layers)
        except Exception:
            segment.close()
            raise
        session.start()
        self._session = session
        region = segment.region
        logger.info(
            "KV pool of %s, %s with what is exchanged, in %s; this process may take %s of memory",
            size_text(region.pool_bytes),
            size_text(region.region_bytes),
            self._config.segment_dir,
            size_text(usable_memory_bytes()),
        )
        logger.info(
            "epoch %d: %d blocks, %d bytes, %d of them in huge pages, %s",
            epoch,
            region.num_blocks,
            region.region_bytes,
            self._huge_page_bytes,
            shape,
        )
        return OpenedRegion(segment.path, region.region_bytes, segment.endpoint, region.num_blocks)

    def _load_layers(self, num_layers: int, wanted: WantedLayers | None) -> None:
        if wanted is None:
            self._layers = None
            return
        from cpu_attn_svc.layers import CpuLayers

        if self._layers is not None and self._layers.has(num_layers, wanted):
            return
        self._layers = None  # Not two at a time.
        self._layers = CpuLayers.load(self._model_source, self._load_format, num_layers, wanted, self._threads)

    @property
    def is_in_use(self) -> bool:
        """Whether an executor has the region mapped."""
        session = self._session
        return session is not None and session.is_open and session.is_attached

    def wait_released(self, timeout_s: float) -> None:
        """Returns once no executor has the region mapped, or when time is up."""
        session = self._session
        if session is not None and session.is_attached:
            session.wait(timeout_s)

    @property
    def computing_s(self) -> float:
        """For how long it has been computing in a single layer; 0 while it waits or is idle."""
        session = self._session
        return session.computing_s if session else 0.0

    def close_region(self) -> None:
        """Gives up what runs."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def status(self) -> HostStatus:
        session = self._session
        if session is None or not session.is_open:
            return NO_REGION
        return HostStatus(
            epoch=session.epoch,
            pool_bytes=session.pool_bytes,
            num_blocks=session.num_blocks,
            blocks_used=session.blocks_used,
            iterations=session.iterations,
            huge_page_bytes=self._huge_page_bytes,
        )
