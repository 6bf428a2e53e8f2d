"""`python -m cpu_attn_svc --config FILE [--index I]`: offers a pool of the host tier, and serves until told to stop."""

import asyncio
import logging

from cpu_attn_svc.host import AttentionHost
from cpu_attn_svc.meters import observe_host
from cpu_attn_svc.servicer import CpuAttentionServicer
from cpu_attn_svc.watch import AttentionWatch
from neoflex.v1 import cpu_attention_pb2, cpu_attention_pb2_grpc
from svc_common import config as configuration
from svc_common.config import Config, ConfigError
from svc_common.cores import CpuClaim, pinnable_cpus, usable_cores
from svc_common.grpc_server import GrpcServer, ListenError, StopSignal
from svc_common.logs import configure_logging, refuse_start
from svc_common.security.door import Door, cpu_attn_door
from svc_common.security.tls import TlsFiles
from svc_common.telemetry.telemetry import Telemetry
from svc_common.watchdog import Watchdog

SERVICE = "cpu_attn_svc"
_STOP_GRACE_S = 1.0

logger = logging.getLogger(SERVICE)


async def serve(config: Config, listen: str, host: AttentionHost, door: Door) -> None:
    """Until SIGTERM or SIGINT, and then until the executor lets go, for at most `config.worker_drain_s`."""
    stop = StopSignal()
    full_name = cpu_attention_pb2.DESCRIPTOR.services_by_name["CpuAttentionService"].full_name
    server, servicer = GrpcServer(listen, [full_name], door), CpuAttentionServicer(host)
    server.register(cpu_attention_pb2_grpc.add_CpuAttentionServiceServicer_to_server, servicer)
    await server.start()
    watch = AttentionWatch(server, host, servicer, config.planner.watchdog_s)
    watchdog = Watchdog(SERVICE, watch, config.planner.watchdog_s, config.logging)
    watchdog.start()
    publishing = asyncio.create_task(watch.publish_health())
    logger.info("listening on %s, %s, up to %d threads", server.address, host.instruction_set, host.max_threads)
    await stop.wait()
    logger.info("stopping once the executor lets go, within %g s", config.worker_drain_s)
    servicer.is_stopping = True
    await watch.publish_now()
    await asyncio.to_thread(host.wait_released, config.worker_drain_s)
    watchdog.stop()
    publishing.cancel()
    await server.stop(_STOP_GRACE_S)
    host.close_region()
    logger.info("stopped")


def main() -> None:
    config, index = configuration.load_cpu_attn_from_argv(SERVICE)
    service, key = config.cpu_attn[index], config.cpu_attn_key(index)
    configure_logging(SERVICE, config.logging)
    # gpu_svc's threads, if pinned, take from the other end.
    claim = CpuClaim(pinnable_cpus(from_end=True), service.num_threads)
    try:
        telemetry = Telemetry(SERVICE, config.telemetry)
        door = cpu_attn_door(service, key, TlsFiles.of(config.tls))
        host = AttentionHost(service, key, usable_cores(), claim.cpus, config.model.source, config.model.load_format)
        logger.info("threads stay on CPUs %s", claim.cpus or "of the kernel's choice")
        observe_host(telemetry.meters, host)
        telemetry.start_metrics(service.metrics_listen, f"{key}.metrics_listen")
        try:
            asyncio.run(serve(config, service.listen, host, door))
        finally:
            telemetry.close()
    except ListenError as error:
        refuse_start(SERVICE, f"{key}.listen: {error}")
    except ConfigError as error:
        refuse_start(SERVICE, str(error))


if __name__ == "__main__":
    main()
