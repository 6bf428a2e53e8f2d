"""What the executor measured of its operations, as the planner's estimator takes it; kept from stage to stage."""

import json
from dataclasses import asdict, fields
from pathlib import Path

from gpu_check.rows import Report
from gpu_check.setting import Setting
from gpu_svc.executor import Executor
from planner_svc.estimator import DecodePoint, LinearPoint, OperationTables, PrefillPoint, TableEstimator

_POINTS = {
    "linear": LinearPoint,
    "head": LinearPoint,
    "cpu_copy": LinearPoint,
    "cpu_linear": LinearPoint,
    "prefill": PrefillPoint,
    "cpu_prefill": PrefillPoint,
    "gpu_decode": DecodePoint,
    "cpu_decode": DecodePoint,
}


def estimator(executor: Executor, setting: Setting, report: Report, case_name: str, with_host: bool) -> TableEstimator:
    """Over operations of an epoch that has run no plan, measured there unless an earlier stage has done so.

    What was measured with a host tier holds without one, too.
    """
    both, alone = (setting.scratch / f"tables-{case_name}-{tiers}.json" for tiers in ("both", "alone"))
    path = both if with_host or both.exists() else alone
    if not path.exists():
        _measure(executor, report, path)
    values = json.loads(path.read_text())
    points = {key: tuple(make(*point) for point in values[key]) for key, make in _POINTS.items()}
    tables = OperationTables(**values | {"cpu_pool_factors": tuple(values["cpu_pool_factors"])} | points)
    return TableEstimator(tables, executor.decoder.spec.num_layers)


def _measure(executor: Executor, report: Report, path: Path) -> None:
    tables = executor.profile()
    known = {field.name for field in fields(OperationTables)}
    values = {key: value for key, value in asdict(tables).items() if key in known}
    path.write_text(json.dumps(values))
    detail = f"swaps {tables.swap_bytes_per_s / 1e9:.1f} GB/s, weights {tables.link_bytes_per_s / 1e9:.1f} GB/s"
    detail += f", an iteration {tables.iteration_s * 1e6:.0f} us beside its layers"
    report.figure("operations", detail, **values)
