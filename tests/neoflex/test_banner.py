"""What `neoflex up` says once the services are ready."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.inference import InferenceServer

from neoflex.cli import up
from neoflex.cli.output import memory_rows
from neoflex.cli.supervise import ready_lines
from neoflex.client import Client
from neoflex.types import MemoryUse


@pytest.mark.parametrize(
    ("dtype", "device", "says"), [("auto", "cpu", True), ("bf16", "cpu", False), ("auto", "cuda", False)]
)
def test_the_type_to_compute_in_and_how_it_was_chosen(
    dtype: str, device: str, says: bool, server: InferenceServer
) -> None:
    with Client(server.address) as client:
        info, model = client.server_info(), client.model_info()
    stack: Any = SimpleNamespace(
        server_info=lambda: replace(info, device=device),
        model_info=lambda: model,
        config=up.effective_config(None, {("gpu", "dtype"): dtype}),
        address=server.address,
        http_url=None,
        console_url=None,
        run_dir="run",
    )
    line = next(line for line in ready_lines(stack, 1.5) if "computes in" in line)
    chosen = ", the faster by measurement" if says else ""
    assert line == f"  device {device}, computes in {model.compute_dtype}{chosen}"


@pytest.mark.parametrize(
    ("load_format", "command"), [("auto", "generate --address {} 'Hello!'"), ("dummy", "bench --address {}")]
)
def test_what_to_try(load_format: str, command: str, server: InferenceServer) -> None:
    with Client(server.address) as client:
        info, model = client.server_info(), client.model_info()
    stack: Any = SimpleNamespace(
        server_info=lambda: info,
        model_info=lambda: model,
        config=up.effective_config(None, {("model", "load_format"): load_format}),
        address=server.address,
        http_url=None,
        console_url=None,
        run_dir="run",
    )
    assert [*ready_lines(stack, 1.5)][-1] == f"  try: neoflex {command.format(server.address)}"


def test_what_the_memory_is_divided_into() -> None:
    gib = 2**30
    use = MemoryUse(16 * gib, 0, 4 * gib, 0, 32 * gib, 1 * gib, gib // 2, 24 * gib)
    assert memory_rows(use) == [
        ("on the device", "weights 16.0 GiB, graphs 512.0 MiB, activations 1.0 GiB, KV 4.0 GiB, free 2.5 GiB"),
        ("in host memory", "KV 32.0 GiB"),
    ]
    # An executor that says nothing of these.
    assert memory_rows(MemoryUse(16 * gib, gib, 4 * gib, gib, 0)) == [
        ("on the device", "weights 16.0 GiB, buffers for streamed weights 1.0 GiB, KV 4.0 GiB"),
        ("in host memory", "weights 1.0 GiB, KV 0 B"),
    ]
