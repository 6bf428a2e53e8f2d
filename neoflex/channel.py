"""How both clients reach a server: channel options and what the health service is asked."""

from grpc_health.v1 import health_pb2

DEFAULT_ADDRESS = "127.0.0.1:50051"
_MAX_MESSAGE_BYTES = 64 * 2**20
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A host that vanished is noticed on a quiet stream, too.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),  # No limit.
    # A server that starts up is found soon after it listens.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # The time that a connection may take to come about, in spite of its name: a busy machine needs more than 100 ms.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
READY_POLL_S = 0.1
_CHECK_TIMEOUT_S = 2.0

ALIVE_REQUEST = health_pb2.HealthCheckRequest(service="liveness")
READY_REQUEST = health_pb2.HealthCheckRequest(service="readiness")


def check_timeout_s(left_s: float) -> float:
    """Long enough for a busy server, short enough to look again."""
    return min(_CHECK_TIMEOUT_S, max(left_s, 0.01))


def is_serving(response: health_pb2.HealthCheckResponse) -> bool:
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
