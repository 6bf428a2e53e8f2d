"""`python -m gpu_svc --config FILE`: loads the model, then executes plans until SIGTERM and the planner's farewell."""

import asyncio
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from llguidance import LLTokenizer

from gpu_svc.activations import Activations
from gpu_svc.budget import epoch_limits, make_budget, measure_activations
from gpu_svc.device_loss import DeviceLostError
from gpu_svc.executor import Executor
from gpu_svc.grammars import Grammars
from gpu_svc.graph_options import graph_options
from gpu_svc.kv_cache import KvShape
from gpu_svc.link import Link
from gpu_svc.loading import load_for_device
from gpu_svc.meters import observe_executor
from gpu_svc.servicer import ExecutorServicer
from gpu_svc.table_cache import TableCache, digest, processor_name
from gpu_svc.watch import ExecutorWatch
from neoflex.v1 import executor_pb2, executor_pb2_grpc
from svc_common import cpu_kernels
from svc_common.config import Config, ConfigError, load_from_argv
from svc_common.cores import usable_cores
from svc_common.decoder.checkpoint import CheckpointError, open_model
from svc_common.decoder.dtypes import DTYPES, KV_DTYPES, choose_compute_dtype, default_kv_dtype, dtype_name
from svc_common.decoder.layer_file import LayerFileError
from svc_common.grpc_server import GrpcServer, ListenError, StopSignal
from svc_common.logs import configure_logging
from svc_common.model.shapes import find_model
from svc_common.model.spec import ModelSpec, UnsupportedModelError
from svc_common.model.store import ModelFiles, ModelNotFoundError, default_cache_dir
from svc_common.model.tokenizer import tokenizer_json
from svc_common.security.door import Door, gpu_door
from svc_common.security.tls import TlsFiles
from svc_common.service_link import check_can_call
from svc_common.telemetry.telemetry import Telemetry
from svc_common.watchdog import Watchdog

_GRACE_S = 1.0
"""For answers that are on their way when the server stops."""

SERVICE = "gpu_svc"

logger = logging.getLogger(SERVICE)


class DeviceUnavailableError(Exception):
    """The configured device is not here."""


_CANNOT_START = (
    ConfigError,
    ModelNotFoundError,
    UnsupportedModelError,
    CheckpointError,
    LayerFileError,
    DeviceUnavailableError,
    DeviceLostError,
)


def main() -> None:
    config = load_from_argv(SERVICE)
    configure_logging(SERVICE, config.logging)
    try:
        tls = TlsFiles.of(config.tls)
        check_can_call([service.listen for service in config.cpu_attn_services], tls)
        door = gpu_door(config, tls)
        telemetry = Telemetry(SERVICE, config.telemetry)
    except ConfigError as error:
        logger.error("%s", error)
        sys.exit(2)
    try:
        asyncio.run(_serve(config, telemetry, door, tls))
    except _CANNOT_START as error:
        logger.error("%s", error)
        sys.exit(2)
    except ListenError as error:
        logger.error("gpu.listen: %s", error)
        sys.exit(2)
    finally:
        telemetry.close()


def _num_threads(config: Config) -> int:
    """As configured; 0 leaves attention on the CPU its cores: one thread too many costs both services dearly."""
    if config.gpu.num_threads:
        return config.gpu.num_threads
    taken = sum(service.num_threads for service in config.cpu_attn_services)
    return max(1, usable_cores() - taken)


def _device(config: Config) -> torch.device:
    here = torch.cuda.is_available()
    if config.gpu.device == "cuda" and not here:
        raise DeviceUnavailableError('gpu.device is "cuda", but torch finds no CUDA device')
    return torch.device("cuda" if here and config.gpu.device != "cpu" else "cpu")


def _link(config: Config, device: torch.device) -> Link:
    """Raises ConfigError where one is to be emulated beside a real one."""
    if config.gpu.link_bytes_per_s and device.type != "cpu":
        raise ConfigError(f'gpu.link_bytes_per_s emulates a link on device "cpu"; {device.type} has its own')
    return Link(config.gpu.link_bytes_per_s)


def make_executor(config: Config) -> Executor:
    device = _device(config)
    files = find_model(config.model.source, config.model.load_format)
    if files.is_dummy:
        logger.warning('model.load_format is "dummy": weights are made up, answers mean nothing')
    spec, checkpoint = open_model(files)
    dtype = choose_compute_dtype(config.gpu.dtype, spec, device)
    kv_dtype = DTYPES[default_kv_dtype(dtype) if config.kv.dtype == "auto" else config.kv.dtype]
    host_dtype = None if config.kv.host_dtype == "auto" else KV_DTYPES[config.kv.host_dtype]
    shape = KvShape.of(spec, config.kv.block_tokens, kv_dtype, host_dtype)
    link, limits = _link(config, device), epoch_limits(config, spec)
    has_host_tier = bool(config.cpu_attn_services)
    activations = Activations(spec, device, DTYPES[dtype], shape.host_dtype if has_host_tier else None)
    budget = make_budget(config, device, shape, activations, limits)
    decoder = load_for_device(files, spec, checkpoint, DTYPES[dtype], device, budget, link)
    if device.type == "cuda":
        measure_activations(budget, decoder, shape, activations, limits)
    executor = Executor(
        decoder,
        shape,
        decoder.memory.kv_bytes,
        table_cache(config),
        make_grammars(files, spec),
        link=link,
        host_kv_bytes=sum(service.kv_bytes for service in config.cpu_attn),
        graphs=graph_options(decoder.memory.graph_bytes, device),
        sized_for=(limits, activations.num_bytes),
    )
    logger.info("%s", decoder.memory.text())
    logger.info(
        "%s (%s) on %s with %d threads: %s, KV %s, on the host %s; weights %d bytes; GPU KV %d blocks of %d bytes "
        "in %d",
        files.name,
        spec.architecture,
        device.type,
        torch.get_num_threads(),
        dtype,
        dtype_name(kv_dtype),
        dtype_name(shape.host_dtype),
        executor.weight_bytes,
        executor.num_gpu_blocks(),
        shape.block_bytes,
        decoder.memory.kv_bytes,
    )
    return executor


def make_grammars(files: ModelFiles, spec: ModelSpec) -> Grammars:
    """For answers that have to match one. The tokenizer is read when the first is wanted."""

    def load_tokenizer() -> LLTokenizer:
        return LLTokenizer(tokenizer_json(files), eos_token=list(spec.eos_token_ids))

    return Grammars(load_tokenizer, spec.eos_token_ids)


def table_cache(config: Config) -> TableCache | None:
    """None where operations are to be measured at each start."""
    if config.gpu.profile == "always":
        return None
    try:
        directory = default_cache_dir() / "profiles"
    except ModelNotFoundError as error:
        logger.warning("measured operations are not kept: %s", error)
        return None
    kernels = Path(cpu_kernels.__file__).parent.glob("*.so")
    machine = {
        "processor": processor_name(),
        "instruction_sets": [service.instruction_set for service in config.cpu_attn],
        "link_bytes_per_s": config.gpu.link_bytes_per_s,
        "torch": torch.__version__,
        "kernels": digest(kernels),
    }
    return TableCache(directory, machine)


async def _serve(config: Config, telemetry: Telemetry, door: Door, tls: TlsFiles | None) -> None:
    """Listens before the model is loaded, so that those who ask hear that it is not ready. Raises _CANNOT_START."""
    stop = StopSignal()
    # torch keeps its number of threads per thread.
    with ThreadPoolExecutor(1, "executor", torch.set_num_threads, (_num_threads(config),)) as thread:
        service_name = executor_pb2.DESCRIPTOR.services_by_name["ExecutorService"].full_name
        server = GrpcServer(config.gpu.listen, [service_name], door)
        addresses = [service.listen for service in config.cpu_attn_services]
        servicer = ExecutorServicer(None, thread, addresses, tls, telemetry.note_span)
        observe_executor(telemetry.meters, lambda: servicer.loaded)
        telemetry.start_metrics(config.gpu.metrics_listen, "gpu.metrics_listen")
        server.register(executor_pb2_grpc.add_ExecutorServiceServicer_to_server, servicer)
        await server.start()
        logger.info("listening on %s, loading the model", server.address)
        watch = ExecutorWatch(server, servicer, config.planner.watchdog_s)
        watchdog = Watchdog(SERVICE, watch, config.planner.watchdog_s, config.logging)
        watchdog.start()
        stopped = asyncio.create_task(stop.wait())
        publishing = asyncio.create_task(watch.publish_health())
        try:
            executor = await _loaded(config, thread, stopped)
            servicer.take(executor)
            await watch.publish_now()
            logger.info("ready")
            await stopped
            logger.info("stopping once the planner lets go, within %g s", config.worker_drain_s)
            servicer.begin_stop()
            await watch.publish_now()
            await servicer.released(config.worker_drain_s)
            await server.stop(_GRACE_S)
            closing = asyncio.get_running_loop().run_in_executor(thread, executor.close)
            await asyncio.wait([closing], timeout=_GRACE_S)
            if not closing.done():
                logger.info("stopped in the middle of an iteration or a measurement")
                telemetry.close()
                os._exit(0)  # Nothing else ends that thread, and nobody is there for what it yields.
            await closing
        finally:
            watchdog.stop()
            publishing.cancel()
            stopped.cancel()
            await server.stop(_GRACE_S)
        logger.info("stopped")


async def _loaded(config: Config, thread: ThreadPoolExecutor, stopped: "asyncio.Task[None]") -> Executor:
    """Made on the executor's thread. Raises _CANNOT_START; does not return where it is told to stop meanwhile."""
    loading = asyncio.get_running_loop().run_in_executor(thread, make_executor, config)
    await asyncio.wait((stopped, loading), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        logger.info("told to stop while the model is loaded")
        os._exit(0)  # Nothing else ends that thread, and nothing is lost.
    return await loading


if __name__ == "__main__":
    main()
