"""The choice of the compute type from measured times, as configured and by device."""

import logging
from dataclasses import replace
from typing import Literal

import pytest
import torch

from svc_common.config import ConfigError
from svc_common.decoder.dtypes import DTYPES, choose_compute_dtype, default_kv_dtype, dtype_name, pick_fastest
from svc_common.model.spec import ModelSpec, RopeSpec

SPEC = ModelSpec("llama", 2, 64, 96, 4, 2, 16, 100, 512, 1e-5, RopeSpec(1e4, 16), True, (2,), "bf16")


def test_fp32_stays_unless_another_is_clearly_faster_at_both_sizes() -> None:
    assert pick_fastest({"fp32": (1.0, 10.0), "bf16": (0.7, 7.0)}) == "bf16"
    assert pick_fastest({"fp32": (1.0, 10.0), "bf16": (0.8, 2.0)}) == "fp32"
    assert pick_fastest({"fp32": (1.0, 10.0), "bf16": (0.5, 9.0)}) == "fp32"
    assert pick_fastest({"fp32": (1.0, 10.0), "bf16": (3.0, 40.0)}) == "fp32"


def test_what_is_configured_is_taken() -> None:
    assert choose_compute_dtype("fp16", SPEC, torch.device("cpu")) == "fp16"


CUDA = torch.device("cuda")


def test_a_gpu_computes_in_the_type_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose_compute_dtype("auto", SPEC, CUDA) == "bf16"
    assert choose_compute_dtype("bf16", SPEC, CUDA) == "bf16"


def test_a_gpu_without_bf16_computes_in_another_type(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose_compute_dtype("auto", SPEC, CUDA) == "fp16"
    assert "this GPU computes no bf16, the checkpoint's type: computing in fp16" in caplog.text
    assert choose_compute_dtype("auto", replace(SPEC, architecture="Gemma2ForCausalLM"), CUDA) == "fp32"
    assert choose_compute_dtype("auto", replace(SPEC, checkpoint_dtype="fp32"), CUDA) == "fp32"
    with pytest.raises(ConfigError, match=r'gpu\.dtype "bf16": this GPU computes none'):
        choose_compute_dtype("bf16", SPEC, CUDA)


def test_auto_on_a_cpu_says_what_it_measured(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chosen = choose_compute_dtype("auto", SPEC, torch.device("cpu"))
    assert chosen in ("fp32", "bf16")
    assert f"computing in {chosen}; measured fp32 " in caplog.text
    assert not any(name in caplog.text for name in ("fp16", "int8", "int4"))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_weights_are_the_cpus(dtype: Literal["int8", "int4"], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose_compute_dtype(dtype, SPEC, torch.device("cpu")) == dtype
    with pytest.raises(ConfigError, match=f'gpu.dtype "{dtype}" is for device "cpu"; on cuda it is not built'):
        choose_compute_dtype(dtype, SPEC, CUDA)


def test_keys_and_values_are_not_quantised_with_the_weights() -> None:
    assert [default_kv_dtype(name) for name in DTYPES] == ["fp32", "bf16", "fp16", "bf16", "bf16"]


def test_names() -> None:
    assert [dtype_name(dtype) for dtype in DTYPES.values()] == ["fp32", "bf16", "fp16", "int8", "int4"]
