"""Every profile and workload of the simulation spec: NeoFlex against the best of its baselines; under bench-planner.

Conversations arrive with targets at rates around what the policies sustain, and are judged by the share in time;
everything comes as a burst without targets, too, and is judged by throughput over the whole run. A request that the
GPU alone cannot hold is left out for all of them.

A full sweep takes hours of one core. With a file of cells it can be interrupted: what is there is not simulated again,
so a file belongs to one commit and one number of requests.
"""

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from results import Row
from rich.progress import track

from planner_svc.simulator.runs import POLICIES, largest_request, run
from planner_svc.simulator.spec import Profile, read_profile, read_spec
from svc_common.workloads.workload import Arrival, read_workload

PROFILES = ("t4", "a10g-2x", "a10g-4x", "a10g-8x", "a10g-16x", "l4", "rtx4090", "h100-8b", "h100x2-70b")
WITH_TARGETS = ("osc-1000", "conv")
BURSTS = ("osc-1000", "conv", *(f"syn-1000-{output}-2000" for output in (50, 100, 200, 300, 400)))
NUM_REQUESTS = 300
"""First ones of a workload."""
SHARES = (0.65, 0.85, 1.0)
"""Rates, of what NeoFlex and of what the best baseline serve of a burst."""
_CLOSE = 0.08
"""Of two rates: one of them is enough."""
_TELLING_SHARE = 0.5
"""In time, of the best policy: below it everybody is overloaded and few requests decide."""
_ALLOWED = 0.98
_LONGEST_GAP_S = 60.0
OURS = "neoflex"


@dataclass(frozen=True)
class Cell:
    """One workload on one machine at one rate, by policy."""

    profile: str
    workload: str
    rate: float
    """Requests a second; 0: a burst."""
    num_requests: int
    values: dict[str, float]
    """Share in time, or requests a second in a burst. A policy that stalls serves no burst."""
    gap_s: float
    """The longest between two tokens of a request, with NeoFlex."""

    @property
    def key(self) -> tuple[str, str, float]:
        return self.profile, self.workload, round(self.rate, 4)

    @cached_property
    def best(self) -> str:
        """Of the baselines."""
        return max((name for name in self.values if name != OURS), key=lambda name: self.values[name])

    @property
    def ratio(self) -> float:
        """NeoFlex over the best baseline, which does something."""
        return self.values[OURS] / self.values[self.best]

    @property
    def tells(self) -> bool:
        return self.values[self.best] > 0 if self.rate == 0 else self.values[self.best] >= _TELLING_SHARE

    @property
    def what(self) -> str:
        unit = "in time" if self.rate else "req/s"
        load = f"{self.workload} at {self.rate:.3g} req/s" if self.rate else f"burst of {self.workload}"
        return f"{load}: {self.values[OURS]:.3f} {unit}, {self.values[self.best]:.3f} {self.best}"


@dataclass(frozen=True)
class _Case:
    """What one process simulates: a workload on a machine, as a burst and then at rates."""

    spec: Path
    profile: str
    workload: str
    num_requests: int


def cells(spec: Path, profiles: Sequence[str], num_requests: int, num_jobs: int, kept: Path | None) -> list[Cell]:
    """All of them. `kept`: JSON lines of cells, which is read first and then appended to."""
    found = _read(kept)
    known = set(read_spec(spec).names)
    if unknown := set(profiles) - known:
        raise SystemExit(
            f"--profiles: {', '.join(sorted(unknown))} not in {spec}; there are {', '.join(sorted(known))}"
        )
    done = {(cell.profile, cell.workload) for cell in found}
    cases = [_Case(spec, profile, load, num_requests) for load in BURSTS for profile in profiles]
    cases = [case for case in cases if (case.profile, case.workload) not in done]
    with multiprocessing.get_context("spawn").Pool(num_jobs) as pool:
        for fresh in track(pool.imap_unordered(simulate, cases), "simulating", len(cases)):
            found += fresh
            if kept is not None:
                with kept.open("a") as file:
                    file.write("".join(json.dumps(asdict(cell)) + "\n" for cell in fresh))
    order = [(profile, load) for profile in profiles for load in BURSTS]
    found = [cell for cell in found if (cell.profile, cell.workload) in order]
    return sorted(found, key=lambda cell: (order.index((cell.profile, cell.workload)), cell.rate))


def simulate(case: _Case) -> list[Cell]:
    """None where no baseline can hold a request."""
    profile = read_profile(case.spec, case.profile)
    arrivals = read_workload(case.spec.parent / "workloads" / f"{case.workload}.json", case.num_requests)
    limit = min(largest_request(policy, profile) for policy in POLICIES)
    fitting = [item for item in arrivals if item.prompt_tokens + item.output_tokens <= limit]
    if not fitting:
        return []
    burst = _cell(case, profile, fitting, 0.0)
    if case.workload not in WITH_TARGETS:
        return [burst]
    return [burst, *(_cell(case, profile, fitting, rate) for rate in _rates(burst))]


def _rates(burst: Cell) -> list[float]:
    """Rising, none close to the one before."""
    rates: list[float] = []
    for rate in sorted(share * burst.values[policy] for share in SHARES for policy in (OURS, burst.best)):
        if rate > 0 and (not rates or rate > rates[-1] * (1 + _CLOSE)):
            rates.append(rate)
    return rates


def _cell(case: _Case, profile: Profile, arrivals: Sequence[Arrival], rate: float) -> Cell:
    values, gap_s = {}, 0.0
    for policy in POLICIES:
        metrics = run(policy, profile, arrivals, rate, may_stall=True)
        # Throughput of a policy that stalls is read until then, over the requests that suited it.
        values[policy] = metrics.slo if rate else metrics.thr_makespan * (metrics.unfinished == 0)
        if policy == OURS:
            gap_s = metrics.gap_max
    return Cell(case.profile, case.workload, rate, len(arrivals), values, gap_s)


def _read(kept: Path | None) -> list[Cell]:
    """What an interrupted sweep left; a line that it did not finish is cut off."""
    if kept is None:
        return []
    kept.parent.mkdir(parents=True, exist_ok=True)
    text = kept.read_text() if kept.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    kept.write_text(whole)
    return [Cell(**json.loads(line)) for line in whole.splitlines()]


def rows(found: Sequence[Cell]) -> Iterator[Row]:
    """For each profile the worst cell with targets, the worst burst, and the longest gap of all."""
    for profile, group in groupby(found, key=lambda cell: cell.profile):
        of_profile = list(group)
        telling = [cell for cell in of_profile if cell.tells]
        for name, part in (
            ("with targets", [cell for cell in telling if cell.rate]),
            ("bursts", [cell for cell in telling if not cell.rate]),
        ):
            if part:
                worst = min(part, key=lambda cell: cell.ratio)
                what = f"{profile}: {name}, worst of {len(part)}"
                yield Row(what, worst.ratio, "neoflex / best baseline", _ALLOWED, detail=worst.what)
        longest = max(of_profile, key=lambda cell: cell.gap_s)
        detail = f"{longest.gap_s:.1f} s in {longest.what}"
        yield Row(f"{profile}: longest gap", longest.gap_s / _LONGEST_GAP_S, "gap / 60 s", 1.0, False, detail)
