"""Decodes at fixed loads, mode by mode: time of an iteration, predicted and measured, and where it goes.

Sequences stand at the middle of their answers. How many of them the host has is the estimator's choice, mode by mode,
by tokens per second; what it predicts is compared with what is then measured.
"""

import json
import statistics
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np

from gpu_check import absent
from gpu_check.activations import report_activations
from gpu_check.cases import BLOCK_TOKENS, MODE_NAMES, Case, case_of, dummy_executor
from gpu_check.choices import NO_GRAPHS, NO_STREAM, Heard, open_epoch, report_graphs, report_host
from gpu_check.estimates import estimator
from gpu_check.host import Worker, cpu_attention
from gpu_check.model import make_executor
from gpu_check.rig import Load, Rig
from gpu_check.rows import Report
from gpu_check.setting import Setting
from gpu_check.timelines import profile_kernels, timelines
from gpu_svc.cpu_trip import cpu_trip
from gpu_svc.executor import Executor
from gpu_svc.host_tier import HostTier
from gpu_svc.limits import Limits
from neoflex.trace.chrome import to_chrome
from planner_svc.estimator import CohortLoad, IterationLoad, SubBatchLoad, TableEstimator, hidden_cohort_layers
from svc_common.decoder.decoder import Decoder
from svc_common.plan import Mode
from svc_common.trace import IterationTrace

_WARM_UP = 3
_LEAST, _MOST = 5, 500
"""Iterations, or steps of a cohort, that are measured, whatever time there is."""
_TRIPS = (1, 16, 64)


def run(setting: Setting, report: Report, case_name: str) -> None:
    case = case_of(case_name, setting)
    reason = absent.lacking_host_tier()
    if reason:
        report.not_run("all modes but GPU-only", reason)
    if not setting.on_cuda and absent.lacking(*absent.EXTENSION_MODULES):
        report.not_run("GPU-only", "device cpu computes with the C++ extensions")
        return
    log = Heard()
    with nullcontext() if reason else cpu_attention(setting) as worker:
        host_kv_bytes = worker.kv_bytes if worker else 0
        with dummy_executor(case, setting, report, host_kv_bytes) as executor:
            if executor is not None:
                _measure_all(setting, report, log, case, case_name, executor, worker)


def _measure_all(
    setting: Setting,
    report: Report,
    log: Heard,
    case: Case,
    case_name: str,
    executor: Executor,
    worker: Worker | None,
) -> None:
    report_activations(setting, report, executor, case.limits)
    modes_s = setting.seconds / (2 * (len(Mode) + 1))
    eager_per_s = _measure_eager(setting, report, case, executor, modes_s)
    host = open_epoch(
        report, executor, 1, case.limits, lambda: worker.attach(executor, 1, case.limits) if worker else None
    )
    report_graphs(setting, report, executor, log)
    if host:
        report_host(report, host, log)
    estimates = estimator(executor, setting, report, case_name, host is not None)
    trips_s = _measure_trips(report, executor.decoder, host, worker, case.limits) if worker and host else {}
    rig = Rig(executor, case)
    modes = [*Mode] if worker and rig.on_host else [Mode.GPU_ONLY]
    traces: list[IterationTrace] = []
    base = eager_per_s, "x without graphs"
    for mode in modes:
        load = _choose(estimates, rig, mode)
        per_s = _measure(report, rig, mode, load, modes_s, *base)
        if mode is Mode.GPU_ONLY:
            base = per_s, "x GPU-only"
        traces += timelines(report, rig, mode, load)
    path = setting.out / f"iterations-{case_name}.json"
    path.write_text(json.dumps(to_chrome(traces)))
    report.figure("timelines of iterations", f"{path}, for https://ui.perfetto.dev")
    if setting.on_cuda:
        mode = Mode.ASYMMETRIC if Mode.ASYMMETRIC in modes else Mode.GPU_ONLY
        profile_kernels(setting, report, case_name, rig, mode, _choose(estimates, rig, mode))
    report.figure("the executor's status", "in the JSON", status=asdict(executor.status()))
    if worker and host:
        if host.uses_stream_doorbells:
            _measure_trips_by_thread(report, executor, worker, case.limits, trips_s)
        else:
            report.not_run("hops by the device's streams", NO_STREAM if not setting.on_cuda else "they can't ring here")


def _measure_eager(setting: Setting, report: Report, case: Case, executor: Executor, seconds: float) -> float:
    """Tokens per second of decodes on the GPU alone that are launched kernel by kernel; 0 where all are."""
    what = "decodes, GPU-only, without graphs"
    if not setting.on_cuda:
        report.not_run(what, NO_GRAPHS)
        return 0.0
    try:
        eager = make_executor(executor.decoder, BLOCK_TOKENS, case.gpu_blocks, graphs=False)
        eager.open_epoch(1, case.limits, None)
        rig = Rig(eager, case)
        load = Load(0, 0, 0, 0.0, len(rig.on_gpu))
        measured_s = statistics.median(_times_s(rig, Mode.GPU_ONLY, load, seconds))
        eager.close()
    except Exception as error:
        traceback.print_exc()
        report.broke(what, False, f"{type(error).__name__}: {error}")
        return 0.0
    per_s = load.tokens / measured_s
    detail = f"{1 / measured_s:.1f} iterations/s, {per_s:.0f} tokens/s; measured {measured_s * 1e3:.2f} ms"
    report.figure(what, detail, tokens_per_s=per_s, measured_s=measured_s)
    return per_s


def _measure_trips(
    report: Report, decoder: Decoder, host: HostTier, worker: Worker, limits: Limits, how: str = ""
) -> dict[int, float]:
    """The hop, layer by layer: q, k and v to the CPU and its answer back. Seconds on the way, by sequences."""
    trips_s = {}
    for num in _TRIPS:
        if num > min(host.num_blocks, limits.max_sequences):
            continue
        tables = np.arange(num, dtype=np.int32)[:, None]
        trip = cpu_trip(decoder, host.only_pool, num, BLOCK_TOKENS, tables)
        by = "copies and doorbells" if host.uses_stream_doorbells else f"copies {trip.copy_s * 1e6:.1f} us, doorbells"
        detail = f"{by} {trip.signal_s * 1e6:.1f} us a layer, "
        detail += (
            f"attention of {BLOCK_TOKENS} tokens each {trip.attention_s * 1e6:.1f} us, {worker.num_threads} threads"
        )
        figures: dict[str, Any] = {"copy_s": trip.copy_s, "signal_s": trip.signal_s, "attention_s": trip.attention_s}
        report.figure(f"hop of {num} sequences{how}", f"{detail}, {worker.instruction_set}", **figures)
        trips_s[num] = trip.copy_s + trip.signal_s
    return trips_s


def _measure_trips_by_thread(
    report: Report, executor: Executor, worker: Worker, limits: Limits, by_stream_s: dict[int, float]
) -> None:
    """The same without what the device does by itself."""
    executor.close_epoch()  # The worker holds one region at a time.
    host = worker.attach(executor, 2, limits, by_thread=True)
    try:
        how = ", by the executor's thread"
        by_thread_s = _measure_trips(report, executor.decoder, host, worker, limits, how)
    finally:
        host.close()
    for num, seconds in by_stream_s.items():
        detail = f"{seconds * 1e6:.1f} us by the streams, {by_thread_s[num] * 1e6:.1f} us by the thread"
        ratio = by_thread_s[num] / seconds if seconds else None
        report.figure(f"way of {num} sequences there and back", detail, ratio, "by the thread / by the streams")


def _choose(estimates: TableEstimator, rig: Rig, mode: Mode) -> Load:
    return max(_loads(estimates, rig, mode), key=lambda load: load.tokens / load.predicted_s)


def _loads(estimates: TableEstimator, rig: Rig, mode: Mode) -> Iterator[Load]:
    """All that are considered; at least one sequence is attended on the CPU in all modes but GPU-only."""
    context, num_gpu = rig.context_tokens, len(rig.on_gpu)

    def batch(num_gpu: int, num_cpu: int) -> SubBatchLoad:
        return SubBatchLoad(
            num_gpu_decodes=num_gpu,
            gpu_context_tokens=num_gpu * context,
            num_cpu_decodes=num_cpu,
            cpu_context_tokens=num_cpu * context,
            num_outputs=num_gpu + num_cpu,
        )

    if mode is Mode.GPU_ONLY:
        yield Load(0, 0, 0, estimates.iteration_s(IterationLoad(batch(num_gpu, 0))), num_gpu)
        return
    for num in _counts(len(rig.on_host)):
        if mode is Mode.SAME_LAYER:
            yield Load(num, 0, 0, estimates.iteration_s(IterationLoad(batch(num_gpu, num))), num_gpu + num)
        elif mode is Mode.ASYMMETRIC:
            for first in {0, num // 4, num // 2} - {num}:
                load = IterationLoad(batch(num_gpu, first), batch(0, num - first))
                yield Load(first, num - first, 0, estimates.iteration_s(load), num_gpu + num)
        else:
            yield _cohort(estimates, batch(num_gpu, 0), num, context)


def _cohort(estimates: TableEstimator, batch: SubBatchLoad, num: int, context: int) -> Load:
    """With as many layers as hide beside the batch."""
    num_layers = estimates.num_layers
    layer_s = estimates.iteration_s(IterationLoad(batch)) / num_layers
    hidden = hidden_cohort_layers(num_layers, layer_s, estimates.cpu_decode_s(num, num * context))
    layers = max(1, min(num_layers, int(hidden)))
    # The last part of a step, which is shorter, and its head, on average over the step.
    num_parts = -(-num_layers // layers)
    load = IterationLoad(batch, cohort=CohortLoad(num, num * context, layers))
    last = IterationLoad(batch, cohort=CohortLoad(num, num * context, num_layers - (num_parts - 1) * layers, num))
    step_s = (num_parts - 1) * estimates.iteration_s(load) + estimates.iteration_s(last)
    return Load(0, num, layers, step_s / num_parts, batch.num_outputs + num / num_parts)


def _counts(most: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and the most."""
    count, step = 1, 1
    while count < most:
        yield count
        count, step = count + step, (count + step) // 2 if count + step > 3 else 1
    yield most


def _times_s(rig: Rig, mode: Mode, load: Load, seconds: float) -> list[float]:
    """Of iterations, or steps of a cohort, that are measured for so long."""
    for _ in range(_WARM_UP):
        rig.step_s(mode, load)
    times_s: list[float] = []
    end_s = time.monotonic() + seconds
    while len(times_s) < _LEAST or (time.monotonic() < end_s and len(times_s) < _MOST):
        times_s.append(rig.step_s(mode, load))
    return times_s


def _measure(
    report: Report, rig: Rig, mode: Mode, load: Load, seconds: float, base_per_s: float, ratio_of: str
) -> float:
    """Tokens per second. `base_per_s`: what that is compared with, if anything."""
    times_s = _times_s(rig, mode, load, seconds)
    # A neighbour of a shared machine disturbs some of them.
    measured_s = statistics.median(times_s)
    per_s = load.tokens / measured_s
    error = load.predicted_s / measured_s - 1
    detail = f"{1 / measured_s:.1f} iterations/s, {per_s:.0f} tokens/s; {len(rig.on_gpu)} sequences of "
    detail += f"{rig.context_tokens} tokens on the GPU, {_where(mode, load)}; predicted {load.predicted_s * 1e3:.2f} "
    detail += f"ms, measured {measured_s * 1e3:.2f} ms ({error:+.1%})"
    figures: dict[str, Any] = {
        "tokens_per_s": per_s,
        "iterations_per_s": 1 / measured_s,
        "predicted_s": load.predicted_s,
    }
    figures |= {"measured_s": measured_s, "least_s": min(times_s), "num_measured": len(times_s)}
    ratio, of = (per_s / base_per_s, ratio_of) if base_per_s else (None, "")
    report.figure(f"decodes, {MODE_NAMES[mode.value]}", detail, ratio, of, error=error, on_host=load.on_host, **figures)
    return per_s


def _where(mode: Mode, load: Load) -> str:
    if mode is Mode.GPU_ONLY:
        return "none on the CPU"
    if mode is Mode.DECOUPLED:
        return f"a cohort of {load.in_second} on the CPU, {load.cohort_layers} layers beside a batch"
    return (
        f"{load.in_first} + {load.in_second} on the CPU" if mode is Mode.ASYMMETRIC else f"{load.in_first} on the CPU"
    )
