"""`python -m gateway_svc --config FILE`: serves HTTP in front of the planner until told to stop."""

import asyncio
import logging
import sys

from gateway_svc.access import access_of
from gateway_svc.server import GatewayServer
from svc_common import config as configuration
from svc_common.config import Config, ConfigError, GatewayConfig
from svc_common.grpc_server import ListenError, StopSignal
from svc_common.logs import configure_logging
from svc_common.security.exposure import exposure
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


async def serve(config: Config) -> None:
    """Until SIGTERM or SIGINT, and then until the answers in hand have ended."""
    stop = StopSignal()
    gateway = config.gateway or GatewayConfig()
    access = access_of(config)
    server = GatewayServer(gateway, config.planner.listen, config.gateway_drain_s, config.logging.access, access=access)
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
        asyncio.run(serve(config))
    except ListenError as error:
        print(f"{SERVICE}: gateway.listen: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except ConfigError as error:
        print(f"{SERVICE}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
