"""What `neoflex up` says once the services are ready."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.inference import InferenceServer

from neoflex.cli import up
from neoflex.cli.supervise import ready_lines
from neoflex.client import Client


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
