"""GET /metrics for Prometheus, on a thread of its own."""

from prometheus_client import CollectorRegistry, start_http_server


class MetricsEndpoint:
    """Answers from when it is made."""

    def __init__(self, listen: str, registry: CollectorRegistry) -> None:
        """`listen` is "host:port"; port 0 takes a free one. Raises OSError where it can't be had."""
        host, _, port = listen.rpartition(":")
        self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
