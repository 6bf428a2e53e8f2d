"""[telemetry]."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from svc_common.config.types import MAX_PORT, Section, checked_address

_ENDPOINT = re.compile(r"https?://(?:[^:/\[\]\s@]+|\[[0-9a-fA-F:.]+\]):(\d+)/?")
_HEADER = re.compile(r"[0-9a-z_-]+(?<!-bin)")
_HEADER_TEXT = re.compile(r"[ -~]*")


def _checked_endpoint(endpoint: str) -> str:
    match = _ENDPOINT.fullmatch(endpoint)
    if not match or not 0 < int(match[1]) <= MAX_PORT:
        raise ValueError(f'must be "http://host:port" or, with TLS, "https://host:port", is {endpoint!r}')
    return endpoint


def _checked_headers(headers: dict[str, str]) -> dict[str, str]:
    for name, text in headers.items():
        if not _HEADER.fullmatch(name):
            raise ValueError(f"a header's name must be of lower-case letters, digits, - and _, not -bin, is {name!r}")
        if not _HEADER_TEXT.fullmatch(text):  # The text itself may be a key.
            raise ValueError(f"{name}: a header's text must be of printable ASCII characters")
    return headers


def _checked_host_port(address: str) -> str:
    if address.startswith("unix:"):
        raise ValueError(f'must be "host:port", is {address!r}')
    return checked_address(address)


HostPort = Annotated[str, AfterValidator(_checked_host_port)]


class TelemetryConfig(Section):
    """What all services tell an OpenTelemetry collector. Each service's `metrics_listen` is for Prometheus."""

    otlp_endpoint: Annotated[str, AfterValidator(_checked_endpoint)] | None = None
    """Where traces, metrics and logs go by OTLP over gRPC: `http://host:port`, or `https://` with TLS. Default: what
    OTEL_EXPORTER_OTLP_ENDPOINT says, and without that nowhere."""
    headers: Annotated[dict[str, str], AfterValidator(_checked_headers)] = Field(default_factory=dict)
    """Sent with each export: a collector's key, say."""
    certificate: Path | None = None
    """Of the authority that signed the collector's certificate, PEM; default: those that gRPC knows."""
    client_certificate: Path | None = None
    """Of this side, PEM, where the collector wants one."""
    client_key: Path | None = None
    """The certificate's private key, PEM."""
    export_interval_s: Annotated[float, Field(ge=0.1, le=3600)] = 10.0
    """Between exports of metrics; spans and log records wait no longer, either."""
    traces_sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the requests that are traced, where the caller's trace context has not decided that."""
    capture_content: bool = False
    """Puts prompts and answers into spans. They are what users wrote: mind who reads the traces."""
    layer_sample_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """Each so many seconds one iteration's layers are timed, for the histograms of layers and of the hop to the CPU;
    0: never. Costs that iteration under a percent."""

    @model_validator(mode="after")
    def _has_a_whole_certificate(self) -> "TelemetryConfig":
        if (self.client_certificate is None) != (self.client_key is None):
            raise ValueError("client_certificate and client_key must both be set, or neither")
        given = self.certificate or self.client_certificate
        if given and self.otlp_endpoint and not self.otlp_endpoint.startswith("https://"):
            raise ValueError(f"certificates are for an https:// endpoint, otlp_endpoint is {self.otlp_endpoint!r}")
        return self
