"""The three real services for a benchmark, with a "GPU" cache too small for the load."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from neoflex.supervisor import LocalStack
from svc_common.config import parse
from svc_common.model.read_spec import read_spec
from svc_common.model.store import resolve

_READY_S = 300.0


@contextmanager
def running(
    mode: str,
    num_kv_tokens: int,
    gpu_share: float,
    longest_tokens: int,
    profile: str,
    *,
    model: str = "smollm2-135m-instruct",
    device: str = "auto",
    dtype: str = "auto",
    gateway: bool = False,
    metrics: bool = False,
    telemetry: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[LocalStack]:
    """Ready to serve, with `gateway` by HTTP on a free port, too; with `metrics` Prometheus' endpoints on free ports.

    `num_kv_tokens`: what all requests need together; `gpu_share` of it lies on the "GPU". `longest_tokens`: most of one
    request. In mode "gpu_only" there is no host tier, and all of it is there.
    """
    kv_bytes = num_kv_tokens * read_spec(resolve(model)).kv_bytes_per_token(4)
    alone = mode == "gpu_only"
    listen = {"metrics_listen": "127.0.0.1:0"} if metrics else {}
    config = parse(
        {
            "model": {"source": model},
            "planner": {"listen": "127.0.0.1:0", "mode": mode, "max_sequence_tokens": longest_tokens, **listen},
            "gpu": {
                "device": device,
                "dtype": dtype,
                "profile": profile,
                "kv_bytes": kv_bytes if alone else int(kv_bytes * gpu_share),
                **listen,
            },
            "cpu_attn": {"kv_bytes": 0 if alone else kv_bytes, **listen},
            "telemetry": dict(telemetry),
            **({"gateway": {"listen": "127.0.0.1:0"}} if gateway else {}),
        },
        "benchmark",
    )
    run_dir = Path(tempfile.mkdtemp(prefix="nfx-"))
    try:
        stack = LocalStack(config, run_dir)
        with stack:
            stack.wait_ready(_READY_S)
            yield stack
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
