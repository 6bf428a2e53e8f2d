"""What launches and Python cost per layer: decodes of a model so small that its kernels take next to nothing."""

import statistics
import time
import traceback
from dataclasses import replace

from gpu_check import absent
from gpu_check.choices import NO_GRAPHS, Heard, captured
from gpu_check.driver import Driver
from gpu_check.model import cpu_decoder, gpu_decoder, llama, make_executor, sixteen_bits
from gpu_check.rows import Report
from gpu_check.setting import Setting
from gpu_svc.limits import Limits
from svc_common.decoder.decoder import Decoder
from svc_common.decoder.dummy import DummyCheckpoint
from svc_common.model.spec import ModelSpec
from svc_common.plan import Mode, SubBatch, Tier

_SPEC = replace(llama(32, 64, 64, 4, 4, 256), sliding_window=16)
_PROMPT_TOKENS = 16
_BLOCK_TOKENS = 16
_MOST_ITERATIONS = 200
_WARM_UP = 10
_NUM_RUNS = 4
"""Two depths, eagerly and with graphs."""


def run(setting: Setting, report: Report) -> None:
    if not setting.on_cuda and (reason := absent.lacking(*absent.EXTENSION_MODULES)):
        report.not_run("launches and Python", reason)
        return
    eager_s = _report(setting, report, graphs=False)
    if not setting.on_cuda:
        report.not_run("launches with graphs", NO_GRAPHS)
        return
    try:
        _report(setting, report, graphs=True, eager_s=eager_s)
    except Exception as error:
        traceback.print_exc()
        report.broke("launches with graphs", False, f"{type(error).__name__}: {error}")


def _report(setting: Setting, report: Report, graphs: bool, eager_s: float = 0.0) -> float:
    """One row; seconds of an iteration. `eager_s`: of one without graphs."""
    log = Heard()
    num_layers, num_sequences = (4, 4) if setting.tiny else (_SPEC.num_layers, 32)
    once_s = _iteration_s(replace(_SPEC, num_layers=num_layers), num_sequences, setting, graphs)
    what = "launches with graphs" if graphs else "launches and Python"
    if once_s is None:
        report.not_run(what, log.graphs_text())
        return 0.0
    twice_s = _iteration_s(replace(_SPEC, num_layers=2 * num_layers), num_sequences, setting, graphs)
    assert twice_s is not None
    layer_us = (twice_s - once_s) / num_layers * 1e6
    rest_us = once_s * 1e6 - num_layers * layer_us
    detail = f"{layer_us:.1f} us a layer, {rest_us:.0f} us an iteration, {num_sequences} decodes"
    ratio, of = (eager_s / once_s, f"x as many iterations of {num_layers} layers as eagerly") if eager_s else (None, "")
    report.figure(what, detail, ratio, of, layer_us=layer_us, iteration_us=rest_us)
    return once_s


def _iteration_s(spec: ModelSpec, num_sequences: int, setting: Setting, graphs: bool) -> float | None:
    """The median of decodes on the device, plan to result; None where they were to be captured and are not."""
    checkpoint = DummyCheckpoint(spec)
    decoder: Decoder
    if setting.on_cuda:
        decoder = gpu_decoder(spec, checkpoint, sixteen_bits(setting.device), setting.device)
    else:
        decoder = cpu_decoder(spec, checkpoint)
    room_tokens = _WARM_UP + _MOST_ITERATIONS
    num_blocks = num_sequences * -(-(_PROMPT_TOKENS + room_tokens) // _BLOCK_TOKENS)
    executor = make_executor(decoder, _BLOCK_TOKENS, num_blocks, graphs=graphs)
    driver = Driver(executor, Limits(num_sequences, 512, _PROMPT_TOKENS + room_tokens))
    if graphs and not captured(executor):
        return None
    ids = tuple(range(num_sequences))
    for sequence_id in ids:
        driver.prefill(sequence_id, range(_PROMPT_TOKENS), Tier.GPU, room_tokens, _PROMPT_TOKENS)
    seconds: list[float] = []
    end_s = time.monotonic() + setting.seconds / _NUM_RUNS
    while len(seconds) < room_tokens and (len(seconds) < 2 * _WARM_UP or time.monotonic() < end_s):
        result = driver.run(SubBatch(gpu_decodes=ids), mode=Mode.GPU_ONLY)
        seconds.append(result.timings.total_ns / 1e9)
    executor.close()
    return statistics.median(seconds[_WARM_UP:])
