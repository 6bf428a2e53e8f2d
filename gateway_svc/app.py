"""Puts the gateway's parts together, as one ASGI application."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway_svc import door
from gateway_svc.access_log import AccessLog
from gateway_svc.console.routes import Console
from gateway_svc.door import Door
from gateway_svc.drain import Drain
from gateway_svc.errors import ApiError
from gateway_svc.metrics import Metrics
from gateway_svc.planner import Planner
from gateway_svc.routes import Routes
from gateway_svc.sse import ClientGoneError
from svc_common.config import GatewayConfig
from svc_common.security.api_keys import ApiKeys

_SHOWN_HEADERS = ("x-request-id", "x-warning", "retry-after")


def make_app(config: GatewayConfig, planner: Planner, drain: Drain, access: AccessLog) -> ASGIApp:
    """Raises ConfigError."""
    keys = ApiKeys("gateway.api_keys_file", config.api_keys_file) if config.api_keys_file else None
    metrics = Metrics()
    table = Routes(planner, metrics, config.max_body_bytes, drain).table
    open_table: list[Route] = []
    if config.console:
        console = Console(planner)
        open_table = console.open_table
        table = [*table, *console.table, *open_table]
    app: ASGIApp = Starlette(
        routes=table,
        exception_handlers={
            ApiError: door.on_api_error,
            ClientGoneError: door.on_client_gone,
            HTTPException: door.on_http_exception,
            Exception: door.on_bug,
        },
    )
    app = Door(app, metrics, keys, drain, access, {route.path for route in table}, {route.path for route in open_table})
    if config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=_SHOWN_HEADERS,
        )
    return app
