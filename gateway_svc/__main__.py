"""`python -m gateway_svc --config FILE`: serves HTTP in front of the planner until told to stop."""

import asyncio
import logging

from gateway_svc.access import access_of
from gateway_svc.server import GatewayServer
from svc_common import config as configuration
from svc_common.config import Config, ConfigError, GatewayConfig
from svc_common.grpc_server import ListenError, StopSignal
from svc_common.logs import configure_logging, refuse_start
from svc_common.security.exposure import exposure
from svc_common.telemetry.telemetry import Telemetry
from svc_common.watchdog import Watchdog

SERVICE = "gateway_svc"

logger = logging.getLogger(SERVICE)


class GatewayWatch:
    """See svc_common.watchdog.Watched. It only passes on, so what can stand still here is its event loop."""

    def __init__(self, server: GatewayServer) -> None:
        self._server = server

    def stall(self) -> str | None:
        return None

    def report(self) -> str:
        return f"{self._server.num_running} HTTP requests in hand"

    async def ask(self) -> str:
        return ""  # The planner writes a state of its own.


async def serve(config: Config, telemetry: Telemetry) -> None:
    """Until SIGTERM or SIGINT, and then until the answers in hand have ended."""
    stop = StopSignal()
    gateway = config.gateway or GatewayConfig()
    access = access_of(config)
    server = GatewayServer(
        gateway,
        config.planner.listen,
        config.gateway_drain_s,
        access=access,
        has_access_log=config.logging.access,
        telemetry=telemetry,
    )
    await server.start()
    watchdog = Watchdog(SERVICE, GatewayWatch(server), config.planner.watchdog_s, config.logging)
    watchdog.start()
    logger.info("listening on %s, planner at %s", server.address, config.planner.listen)
    asks_who = gateway.api_keys_file is not None or gateway.client_certificates
    if complaint := exposure(server.address, access.https is not None, asks_who):
        logger.warning("%s", complaint)
    await stop.wait()
    logger.info("draining: %d requests in hand, %g s for them", server.num_running, config.gateway_drain_s)
    await server.stop()
    watchdog.stop()
    logger.info("stopped")


def main() -> None:
    config = configuration.load_from_argv(SERVICE)
    configure_logging(SERVICE, config.logging)
    try:
        telemetry = Telemetry(SERVICE, config.telemetry)
        try:
            asyncio.run(serve(config, telemetry))
        finally:
            telemetry.close()
    except ListenError as error:
        refuse_start(SERVICE, f"gateway.listen: {error}")
    except ConfigError as error:
        refuse_start(SERVICE, str(error))


if __name__ == "__main__":
    main()
