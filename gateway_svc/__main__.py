"""`python -m gateway_svc --config FILE`: serves HTTP in front of the planner until told to stop."""

import asyncio
import ipaddress
import logging
import sys

from gateway_svc.keys import KeysError
from gateway_svc.server import GatewayServer
from svc_common import config as configuration
from svc_common.config import Config, ConfigError, GatewayConfig
from svc_common.grpc_server import ListenError, configure_logging, until_stop_signal
from svc_common.telemetry.telemetry import Telemetry

SERVICE = "gateway_svc"
DRAIN_GRACE_S = 35.0
"""A little longer than the planner's: the answers that it cuts off then end with an error that says so."""

logger = logging.getLogger(SERVICE)


async def serve(config: Config, telemetry: Telemetry) -> None:
    """Until SIGTERM or SIGINT, and then until the answers in hand have ended."""
    gateway = config.gateway or GatewayConfig()
    server = GatewayServer(gateway, config.planner.listen, DRAIN_GRACE_S, telemetry)
    await server.start()
    logger.info("listening on %s, planner at %s", server.address, config.planner.listen)
    if gateway.api_keys_file is None and not _is_local(server.address):
        logger.warning("whoever reaches %s may call: gateway.api_keys_file is not set", server.address)
    await until_stop_signal()
    logger.info("draining")
    await server.stop()
    logger.info("stopped")


def _is_local(address: str) -> bool:
    """Whether only this machine reaches it. A name counts as foreign unless it is localhost."""
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def main() -> None:
    config = configuration.load_from_argv(SERVICE)
    configure_logging(SERVICE)
    try:
        telemetry = Telemetry(SERVICE, config.telemetry)
        try:
            asyncio.run(serve(config, telemetry))
        finally:
            telemetry.close()
    except ListenError as error:
        print(f"{SERVICE}: gateway.listen: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (ConfigError, KeysError) as error:
        print(f"{SERVICE}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
