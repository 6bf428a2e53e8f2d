"""Asks a service how it is, for health checks: by grpc.health.v1, or of the gateway by HTTP. Waits for nothing.

`python -m neoflex.health ADDRESS` is `neoflex health ADDRESS` at a quarter of its CPU time, for those who ask for ever.
"""

import http.client
import sys
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from neoflex.access import Access, Tls
from neoflex.channel import is_serving
from neoflex.errors import AccessError
from svc_common.security.handshake import handshake_trouble

READINESS = "readiness"
LIVENESS = "liveness"
_TIMEOUT_S = 2.0
_HTTP_PATHS = {READINESS: "/health/ready", LIVENESS: "/health/live"}


def complaint(address: str, service: str, timeout_s: float, access: Access | None = None) -> str | None:
    """Why the service at `host:port`, `unix:path` or `http[s]://host:port` is not well; None where it is.

    `service`: a name of the server's health service; by HTTP there are "readiness" and "liveness" alone. `access`: by
    default that of the environment. Raises AccessError.
    """
    access = access or Access.of(None, None)
    if address.startswith(("http://", "https://")):
        return _http_complaint(address, service, timeout_s, access)
    with access.channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return _grpc_complaint(error, address, service, timeout_s, access)
    if is_serving(answer):
        return None
    return f"{address}: {service or 'the server'} is {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"


def _grpc_complaint(error: grpc.RpcError, address: str, service: str, timeout_s: float, access: Access) -> str:
    match error.code():
        case grpc.StatusCode.NOT_FOUND:
            return f"{address}: has no service named {service!r}"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"{address}: no answer within {timeout_s:g} s"
        case code:
            trouble = handshake_trouble(error.details() or "", address, access.greeting)
            return trouble or f"{address}: {code.name}: {error.details()}"


def _http_complaint(url: str, service: str, timeout_s: float, access: Access) -> str | None:
    if service not in _HTTP_PATHS:
        return f"{url}: by HTTP there are {' and '.join(_HTTP_PATHS)}, not {service!r}"
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=timeout_s)
    if parts.scheme == "https":
        context = (access.tls or Tls()).ssl_context()
        connection = http.client.HTTPSConnection(parts.netloc, timeout=timeout_s, context=context)
    try:
        connection.request("GET", _HTTP_PATHS[service])
        status = connection.getresponse().status
        connection.close()
    except TimeoutError:
        return f"{url}: no answer within {timeout_s:g} s"
    except (OSError, http.client.HTTPException) as error:
        return f"{url}: {getattr(error, 'strerror', None) or error}"
    return None if status == http.HTTPStatus.OK else f"{url}: {service} is {status} {http.HTTPStatus(status).phrase}"


def main() -> None:
    """Asks for readiness; exits with 1 and the complaint, if there is one."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m neoflex.health ADDRESS")
    try:
        found = complaint(sys.argv[1], READINESS, _TIMEOUT_S)
    except AccessError as error:
        found = str(error)
    raise SystemExit(found)


if __name__ == "__main__":
    main()
