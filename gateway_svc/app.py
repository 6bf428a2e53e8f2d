"""Puts the gateway's parts together, as one ASGI application."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway_svc import door
from gateway_svc.console.routes import Console
from gateway_svc.door import Door
from gateway_svc.errors import ApiError
from gateway_svc.keys import ApiKeys
from gateway_svc.metrics import Metrics
from gateway_svc.planner import Planner
from gateway_svc.routes import Routes
from gateway_svc.sse import ClientGoneError
from svc_common.config import GatewayConfig
from svc_common.telemetry.telemetry import Telemetry

_SHOWN_HEADERS = ("x-request-id", "x-warning", "retry-after")


def make_app(config: GatewayConfig, planner: Planner, telemetry: Telemetry) -> ASGIApp:
    """Raises KeysError."""
    keys = ApiKeys(config.api_keys_file) if config.api_keys_file else None
    table = Routes(planner, telemetry.registry, config.max_body_bytes).table
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
    paths, open_paths = {route.path for route in table}, {route.path for route in open_table}
    app = Door(app, Metrics(telemetry.meters), keys, paths, open_paths, telemetry.tracer)
    if config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=_SHOWN_HEADERS,
        )
    return app
