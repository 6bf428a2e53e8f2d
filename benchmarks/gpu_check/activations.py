"""What the largest batch takes on the device, beside what its shapes say that it takes at most."""

import traceback

from gpu_check.rows import Report
from gpu_check.setting import Setting
from gpu_svc.activations import Activations
from gpu_svc.executor import Executor
from gpu_svc.largest_batch import measured_bytes
from gpu_svc.limits import Limits

_WHAT = "memory of activations"


def report_activations(setting: Setting, report: Report, executor: Executor, limits: Limits) -> None:
    """One row; of an executor without an open epoch, so that there is room."""
    if not setting.on_cuda:
        report.not_run(_WHAT, "device cpu has no count of what is allocated")
        return
    decoder = executor.decoder
    bound = Activations(decoder.spec, decoder.device, decoder.weight_dtype, None).num_bytes(limits)
    try:
        measured = measured_bytes(decoder, executor.kv_shape, limits)
    except Exception as error:
        traceback.print_exc()
        report.broke(_WHAT, False, f"{type(error).__name__}: {error}; {bound / 1e9:.2f} GB by shapes")
        return
    detail = f"{measured / 1e9:.2f} GB at the peak of {limits.max_batch_tokens} tokens of {limits.max_sequences} "
    detail += f"sequences, KV of one layer included; at most {bound / 1e9:.2f} GB by shapes"
    report.figure(_WHAT, detail, measured / bound, "measured / by shapes", measured_bytes=measured, bound_bytes=bound)
