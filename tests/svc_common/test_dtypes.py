"""The choice of the compute type from measured times, as configured and by device."""

import logging

import pytest
import torch

from svc_common.decoder.dtypes import choose_compute_dtype, dtype_name, pick_fastest
from svc_common.model.spec import ModelSpec, RopeSpec

SPEC = ModelSpec("llama", 2, 64, 96, 4, 2, 16, 100, 512, 1e-5, RopeSpec(1e4, 16), True, (2,), "bf16")


def test_fp32_stays_unless_another_is_clearly_faster_at_both_sizes() -> None:
    assert pick_fastest({"fp32": (1.0, 10.0), "bf16": (0.7, 7.0)}) == "bf16"
    assert pick_fastest({"fp32": (1.0, 10.0), "bf16": (0.8, 2.0)}) == "fp32"
    assert pick_fastest({"fp32": (1.0, 10.0), "bf16": (0.5, 9.0)}) == "fp32"
    assert pick_fastest({"fp32": (1.0, 10.0), "bf16": (3.0, 40.0)}) == "fp32"


def test_what_is_configured_is_taken() -> None:
    assert choose_compute_dtype("fp16", SPEC, torch.device("cpu")) == "fp16"


def test_a_gpu_computes_in_the_type_of_the_checkpoint() -> None:
    assert choose_compute_dtype("auto", SPEC, torch.device("cuda")) == "bf16"


def test_auto_on_a_cpu_says_what_it_measured(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chosen = choose_compute_dtype("auto", SPEC, torch.device("cpu"))
    assert chosen in ("fp32", "bf16")
    assert f"computing in {chosen}; measured fp32 " in caplog.text
    assert "fp16" not in caplog.text


def test_names() -> None:
    assert [dtype_name(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)] == ["fp32", "bf16", "fp16"]
