"""A scripted HTTP server with OpenAI's completions, for tests of what talks to one."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StandIn(ThreadingHTTPServer):
    """Answers each completion with max_tokens tokens, unless `status` says otherwise; keeps the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.ends_early = False
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"object": "list", "data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.authorizations.append(self.headers["Authorization"])
        if self.server.status != 200:
            self._answer(self.server.status, b'{"error": {"message": "no", "code": "busy"}}')
            return
        events: list[dict[str, Any]] = [{"choices": [{"text": "x"}]} for _ in range(body["max_tokens"])]
        if self.server.ends_early:
            events[1:] = [{"error": {"message": "lost", "code": "EXECUTOR_LOST"}}]
        else:
            events.append({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
        self._answer(200, "".join(lines).encode(), "text/event-stream")

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # The base class names it.
        pass


@contextmanager
def stand_in() -> Iterator[StandIn]:
    server = StandIn()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
