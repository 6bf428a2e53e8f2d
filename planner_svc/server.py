"""Puts the planner together: the engine, its loop with the executor, and the gRPC server before it."""

import asyncio
import contextlib

from neoflex.v1 import inference_pb2, inference_pb2_grpc, trace_pb2, trace_pb2_grpc
from planner_svc.access_log import AccessLog
from planner_svc.classes import service_classes
from planner_svc.configured_policy import configured_policy
from planner_svc.core_keeper import CoreKeeper
from planner_svc.cores import CoreController, ThreadLimits
from planner_svc.engine import Engine
from planner_svc.epochs import Epochs
from planner_svc.estimator import OperationTables, TableEstimator
from planner_svc.executor_client import EpochLimits, ExecutorClient, HostClient
from planner_svc.executor_loop import ExecutorLoop
from planner_svc.grammar_door import GrammarDoor
from planner_svc.host_watch import HostWatch
from planner_svc.iteration_meters import IterationMeters
from planner_svc.policy_keeper import PolicyKeeper
from planner_svc.request_meters import RequestMeters
from planner_svc.request_span import face_of
from planner_svc.server_meters import observe_engine
from planner_svc.servicer import InferenceServicer, ServedModel
from planner_svc.trace_servicer import TraceServicer
from planner_svc.traces import Traces
from planner_svc.watch import PlannerWatch
from svc_common.config import Config, CpuAttnConfig
from svc_common.errors import unavailable
from svc_common.grpc_server import GrpcServer
from svc_common.memory import usable_memory_bytes
from svc_common.policy import ExecutionPolicy
from svc_common.security.door import planner_door
from svc_common.security.tls import TlsFiles
from svc_common.telemetry.telemetry import Telemetry
from svc_common.watchdog import Watchdog

SERVICE = "planner_svc"
SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_TRACE_SERVICE_NAME = trace_pb2.DESCRIPTOR.services_by_name["TraceService"].full_name
_HEALTH_EVERY_S = 0.5
_CLOSE_S = 1.0
"""For answers that are on their way when the server stops."""


class PlannerServer:
    """Started once, stopped once. Ready when the executor is."""

    def __init__(self, config: Config, model: ServedModel, telemetry: Telemetry | None = None) -> None:
        """Raises ConfigError where the model has other layers than the configuration speaks of, and where certificates,
        keys or groups can't be had."""
        tls = TlsFiles.of(config.tls)
        planner, services = config.planner, config.cpu_attn_services
        classes = service_classes(planner)
        self._telemetry = telemetry = telemetry or Telemetry(SERVICE)
        self._metrics_listen = planner.metrics_listen
        meters = RequestMeters(telemetry, face_of(model.name, planner.listen), classes.by_name)
        self._engine = Engine(
            model.tokenizer, planner.mode, planner.max_waiting_requests, classes, meters, planner.watchdog_s
        )
        observe_engine(telemetry.meters, self._engine)
        self._executor = ExecutorClient(config.gpu.listen, tls)
        self._hosts = [HostClient(service.listen, tls) for service in services]
        limits = EpochLimits(planner.max_running_sequences, planner.max_batch_tokens, model.limits.max_sequence_tokens)

        num_layers = model.spec.num_layers

        def make_estimator(tables: OperationTables, policy: ExecutionPolicy | None) -> TableEstimator:
            return TableEstimator(tables, num_layers, policy)

        watches = [
            HostWatch(host, CoreKeeper(CoreController(_thread_limits(service)), self._engine.counters, pool))
            for pool, (host, service) in enumerate(zip(self._hosts, services, strict=True))
        ]
        traces = Traces()
        policy = configured_policy(planner, num_layers)
        keeper = PolicyKeeper(config, model.spec, limits, usable_memory_bytes()) if policy is None else None
        epochs = Epochs(
            self._executor, watches, limits, model.block_tokens, model.spec.digest, make_estimator, policy, keeper
        )
        self._loop = ExecutorLoop(
            self._engine,
            self._executor,
            epochs,
            watches,
            traces,
            IterationMeters(telemetry, self._engine.span_of),
            planner.executor_wait_s,
            keeper,
        )
        self._server = GrpcServer(planner.listen, [SERVICE_NAME, _TRACE_SERVICE_NAME], planner_door(config, tls))
        self._servicer = InferenceServicer(
            model,
            self._engine,
            classes,
            lambda: self._loop.placement,
            GrammarDoor(self._executor.compile_grammar),
            AccessLog(config.logging.access),
            meters,
            tuple(host.address for host in self._hosts),
        )
        self._server.register(inference_pb2_grpc.add_InferenceServiceServicer_to_server, self._servicer)
        self._server.register(trace_pb2_grpc.add_TraceServiceServicer_to_server, TraceServicer(traces))
        self._tasks: list[asyncio.Task[None]] = []
        watch = PlannerWatch(self._engine, self._loop)
        self._watchdog = Watchdog(SERVICE, watch, planner.watchdog_s, config.logging, self._note_stall)

    @property
    def address(self) -> str:
        """Where it listens, with the port that was taken."""
        return self._server.address

    async def start(self) -> None:
        """Listens. Raises ListenError, and ConfigError where TLS or the address of the metrics can't be had."""
        self._telemetry.start_metrics(self._metrics_listen, "planner.metrics_listen")
        await self._server.start()
        self._tasks = [asyncio.create_task(self._loop.run()), asyncio.create_task(self._publish_health())]
        self._watchdog.start()

    @property
    def num_requests(self) -> int:
        """In hand."""
        return len(self._engine.in_hand)

    async def stop(self, grace_s: float) -> None:
        """Refuses new requests, lets those in hand go on for `grace_s` seconds, and ends."""
        self._engine.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._engine.in_hand.idle.wait()
                await self._servicer.idle.wait()
        self._watchdog.stop()
        self._engine.in_hand.fail_all(unavailable("DRAINING", "the server is shutting down"))
        await self._server.stop(_CLOSE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._executor.close()
        for host in self._hosts:
            await host.close()

    def _note_stall(self) -> None:
        self._engine.counters.stalls += 1

    async def _publish_health(self) -> None:
        """Tells watchers whether a request would be served, and whether those in hand get ahead."""
        while True:
            self._engine.changed.clear()
            await self._server.set_alive(self._engine.is_alive())
            await self._server.set_ready(self._engine.is_ready())
            with contextlib.suppress(TimeoutError):  # A stall is a matter of time alone.
                async with asyncio.timeout(_HEALTH_EVERY_S):
                    await self._engine.changed.wait()


def _thread_limits(service: CpuAttnConfig) -> ThreadLimits | None:
    return ThreadLimits(service.min_threads, service.max_threads or None) if service.elastic else None
