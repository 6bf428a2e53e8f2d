"""[tls]."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from svc_common.config.types import Section


class TlsConfig(Section):
    """With [tls] each address `host:port` of the configuration speaks TLS; those that are `unix:path` do not.

    gpu_svc and cpu_attn_svc then ask their callers for a certificate of `ca`; planner_svc and gateway_svc do where
    their `client_certificates` says so. All files are PEM, and are read again when they change.
    """

    certificate: Path
    """The service's own, followed by those between it and the CA. It is shown to callers and to services called."""
    key: Path
    """Private key of `certificate`, not encrypted. A file that everybody may read is refused."""
    ca: Path | None = None
    """Certificates of the CAs that peers' certificates come from. Needed wherever a peer's is checked; `neoflex up`,
    whose services share one certificate, does without."""
    server_name: Annotated[str, Field(min_length=1)] | None = None
    """Name that certificates of services called must be for; default: the host of their address. `neoflex up` takes
    one of the names in `certificate`."""
