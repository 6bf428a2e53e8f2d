"""Whether layers that are streamed to the device, or computed by the CPU, yield the tokens of device "cpu"."""

import json
import os
from pathlib import Path

import torch

from gpu_check import absent
from gpu_check.driver import Driver
from gpu_check.host import Worker, cpu_attention
from gpu_check.model import TINY, cpu_decoder, hf_config
from gpu_check.rows import Report
from gpu_check.setting import Setting
from gpu_check.tokens import LIMITS, asymmetric, compare, gpu_only, gpu_only_tokens, tiny_executor
from svc_common.decoder.dummy import DummyCheckpoint
from svc_common.policy import ExecutionPolicy

_LAYERS = TINY.num_layers
_POLICIES = {
    "all but one layer streamed": ExecutionPolicy(resident_layers=1),
    "decodes' first two layers on the CPU": ExecutionPolicy(_LAYERS, 0, 2),
    "first two layers on the CPU, one more streamed": ExecutionPolicy(_LAYERS - 3, 2, 2),
    "all layers on the CPU": ExecutionPolicy(0, _LAYERS, _LAYERS),
}


def run(setting: Setting, report: Report) -> None:
    reason = absent.lacking("pydantic") or absent.lacking_host_tier()
    if reason:
        for name in _POLICIES:
            report.not_run(_what(name), reason)
        return
    os.environ["XDG_CACHE_HOME"] = str(setting.scratch / "cache")  # Of the packed layers, here and in the worker.
    expected = gpu_only_tokens(cpu_decoder(TINY, DummyCheckpoint(TINY)))
    model = _write(setting.scratch / "tiny")
    with cpu_attention(setting) as worker:
        for epoch, (name, policy) in enumerate(_POLICIES.items(), start=1):
            try:
                compare(report, _what(name), _tokens(setting, worker, model, policy, epoch), expected)
            except Exception as error:
                report.broke(_what(name), True, f"{type(error).__name__}: {error}")


def _what(name: str) -> str:
    return f"tokens, {name}"


def _write(directory: Path) -> Path:
    """The tiny model's shape: both processes make the same weights of it."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf_config(TINY)))
    return directory


def _tokens(setting: Setting, worker: Worker, model: Path, policy: ExecutionPolicy, epoch: int) -> dict[int, list[int]]:
    from gpu_svc.device_kernels import decoder_ops
    from gpu_svc.device_memory import DeviceMemory
    from gpu_svc.link import Link
    from gpu_svc.placed_decoder import PlacedDecoder
    from gpu_svc.torch_layers import TorchLayers
    from svc_common.decoder.checkpoint import open_model
    from svc_common.decoder.cpu_decoder import CpuDecoder
    from svc_common.decoder.layer_writer import open_layer_file
    from svc_common.decoder.load import Loader
    from svc_common.decoder.torch_decoder import TorchDecoder
    from svc_common.model.shapes import find_model

    files = find_model(str(model), "dummy")
    spec, checkpoint = open_model(files)
    weights = Loader(checkpoint, spec, torch.float32, setting.device).weights(with_layers=False)
    decoder = TorchDecoder(spec, weights, decoder_ops(setting.device))
    file = open_layer_file(files, spec, checkpoint, torch.float32)
    memory = DeviceMemory(2**40, file.layer_bytes, decoder.weight_bytes, 0, num_stagings=1)
    layers = TorchLayers(decoder, CpuDecoder(spec, torch.float32), lambda: file, Link())
    executor = tiny_executor(PlacedDecoder(layers, memory), worker.kv_bytes)
    try:
        host = worker.attach(executor, epoch, LIMITS, policy, str(model))
        driver = Driver(executor, LIMITS, host, policy, epoch)
        # Where the CPU computes layers, it still attends for those above them.
        (asymmetric if 0 < policy.decode_cpu_layers < _LAYERS else gpu_only)(driver)
        return driver.tokens
    finally:
        executor.close()
