"""`python -m gateway_svc --config FILE`: serves HTTP in front of the planner until told to stop."""

import asyncio
import logging
import sys

from gateway_svc.access import access_of
from gateway_svc.server import GatewayServer
from svc_common import config as configuration
from svc_common.config import Config, ConfigError, GatewayConfig
from svc_common.grpc_server import ListenError, configure_logging, until_stop_signal
from svc_common.security.exposure import exposure

SERVICE = "gateway_svc"
DRAIN_GRACE_S = 35.0
"""A little longer than the planner's: the answers that it cuts off then end with an error that says so."""

logger = logging.getLogger(SERVICE)


async def serve(config: Config) -> None:
    """Until SIGTERM or SIGINT, and then until the answers in hand have ended."""
    gateway = config.gateway or GatewayConfig()
    access = access_of(config)
    server = GatewayServer(gateway, config.planner.listen, DRAIN_GRACE_S, access=access)
    await server.start()
    logger.info("listening on %s, planner at %s", server.address, config.planner.listen)
    asks_who = gateway.api_keys_file is not None or gateway.client_certificates
    if complaint := exposure(server.address, access.https is not None, asks_who):
        logger.warning("%s", complaint)
    await until_stop_signal()
    logger.info("draining")
    await server.stop()
    logger.info("stopped")


def main() -> None:
    config = configuration.load_from_argv(SERVICE)
    configure_logging(SERVICE)
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
