"""Whether Triton's kernels are used is decided by running them; here in its interpreter."""

from dataclasses import replace

import pytest
import torch
from support.gpu import CPU
from support.paged_attention import spec

from gpu_svc import device_kernels
from gpu_svc.attention.torch_backend import TorchAttention
from gpu_svc.attention.triton_backend import TritonAttention
from gpu_svc.device_loss import DeviceLostError, check_after_trial
from gpu_svc.kernel_trial import attention_failure, layers_failure, sampling_failure
from gpu_svc.triton_ops import TritonOps
from svc_common.decoder.ops import TorchOps


def test_kernels_that_agree_are_used() -> None:
    assert layers_failure(CPU) is None
    assert sampling_failure(CPU) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_agrees_is_used(dtype: torch.dtype) -> None:
    model = spec(6, 2, window=7, softcap=20.0)
    backends = [kind(model, 16, dtype, CPU) for kind in (TritonAttention, TorchAttention)]
    assert attention_failure(*backends, model, 16, dtype, dtype, CPU) is None


def test_the_reason_names_what_differs_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = spec(6, 2), spec(6, 2, softcap=0.5)
    backends = TritonAttention(model, 16, torch.float32, CPU), TorchAttention(other, 16, torch.float32, CPU)
    failure = attention_failure(*backends, model, 16, torch.float32, torch.float32, CPU)
    assert failure is not None
    assert failure.startswith("attention of decodes differs from torch's by up to 0.")

    def fails(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(TritonOps, "rms_norm", fails)
    assert layers_failure(CPU) == "RuntimeError: Failed to find C compiler"


def test_without_a_gpu_torch_computes_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    device_kernels._runs_on_cuda.cache_clear()
    assert isinstance(device_kernels.decoder_ops(torch.device("cuda")), TorchOps)
    assert not device_kernels.has_triton(torch.device("cuda"))
    (record,) = caplog.records
    assert record.getMessage().startswith("Triton's kernels are not used, torch computes: ")


def test_a_trial_that_costs_the_device_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    check_after_trial(cuda, "RMSNorm differs from torch's")
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    check_after_trial(cuda, None)
    with pytest.raises(DeviceLostError, match=r"\(RMSNorm differs.*\): without the package triton torch computes"):
        check_after_trial(cuda, "RMSNorm differs from torch's")


def test_heads_of_odd_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="heads of 15 numbers"):
        TritonAttention(replace(spec(6, 2), head_dim=15), 16, torch.float32, CPU)
