"""Rows of bench-planner that need no simulation spec: machines of machines.json, workloads made from a line of text.

No rule of the scheduler was chosen by them.
"""

from collections.abc import Iterator
from pathlib import Path

from results import Row

from planner_svc.simulator.runs import POLICIES, run
from planner_svc.simulator.spec import read_spec
from svc_common.workloads.generated import generate

NO_LOSS = (
    # machine, requests/s near saturation or 0 for a burst, workload in words, and as it is generated
    ("workstation", 2.5, "chat in bunches", "gamma:requests=300,prompt=700~0.9,output=220~0.6,cv=1.5,seed=11"),
    ("workstation", 1.6, "long answers", "poisson:requests=300,prompt=200~0.5,output=600~0.5,seed=13"),
    ("laptop", 0.9, "chat in bunches", "gamma:requests=300,prompt=700~0.9,output=220~0.6,cv=1.5,seed=11"),
    ("laptop", 0.2, "long prompts", "poisson:requests=300,prompt=2000-4000,output=150-250,seed=12"),
    ("workstation", 0.0, "long answers", "poisson:requests=300,prompt=200~0.5,output=600~0.5,seed=13"),
)


def rows() -> Iterator[Row]:
    """Ours against the best baseline, by the share in time or, in a burst, by throughput."""
    spec = read_spec(Path(__file__).with_name("machines.json"))
    for machine, rate, words, text in NO_LOSS:
        profile, arrivals = spec.profile(machine), generate(text).arrivals
        values = {}
        for policy in POLICIES:
            metrics = run(policy, profile, arrivals, rate, may_stall=True)
            # Throughput of a policy that stalls is read until then, over the requests that suited it.
            values[policy] = metrics.slo if rate else metrics.thr_makespan * (metrics.unfinished == 0)
        ours = values.pop("neoflex")
        best = max(values, key=lambda policy: values[policy])
        what, unit = (f"{words} at {rate:g} req/s", "in time") if rate else (f"burst of {words}", "req/s")
        detail = f"{ours:.3f} {unit}, {values[best]:.3f} {best}"
        yield Row(f"{machine}: {what}", ours / values[best], "neoflex / best baseline", 0.98, detail=detail)
