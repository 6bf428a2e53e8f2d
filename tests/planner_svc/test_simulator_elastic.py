"""The core controller in the simulator: threads follow the load, and their number has its effect."""

import json
import sys

import pytest
from support.machines import SPEC

from planner_svc.estimator import Factors
from planner_svc.simulator import __main__ as simulator
from planner_svc.simulator.elastic import ElasticCores
from planner_svc.simulator.executor import SimulatedExecutor
from planner_svc.simulator.runs import run
from planner_svc.simulator.spec import parse_profile
from svc_common.workloads.generated import generate

BOX = parse_profile(SPEC, "box", "test")
LOAD = "poisson:requests=150,prompt=200,output=60"


def simulated(rate, threads=None):
    return run("neoflex", BOX, generate(LOAD).arrivals, rate, threads=threads)


def test_a_light_load_gives_threads_back_and_a_heavy_one_keeps_more():
    light, heavy = simulated(5.0, (1, 8)), simulated(60.0, (1, 8))
    assert light.threads[0] == heavy.threads[0] == (0.0, 8)
    assert [num for _, num in light.threads[1:3]] == [4, 2]  # At most half at a time.
    assert 1 <= light.threads_mean < heavy.threads_mean <= 8
    assert light.slo == 1.0
    assert light.cpu_busy > simulated(5.0).cpu_busy  # The same attention by fewer threads.


def test_threads_that_may_not_change_change_nothing():
    fixed, plain = simulated(20.0, (4, 4)), simulated(20.0)
    assert (fixed.threads, fixed.threads_mean) == (((0.0, 4),), 4.0)
    assert fixed.tpot_p95 == plain.tpot_p95
    assert plain.threads == ()


def test_the_mean_is_over_the_run():
    factors = Factors()
    executor = SimulatedExecutor(BOX.estimator.calibrated(factors), BOX.estimator.kv_bytes_per_token)
    cores = ElasticCores(1, 8, executor, factors)
    assert cores.mean(5.0) == 8
    cores.changes += [(1.0, 4), (3.0, 2)]
    assert cores.mean(5.0) == pytest.approx((8 + 2 * 4 + 2 * 2) / 5)
    assert cores.mean(2.0) == pytest.approx((8 + 4) / 2)  # What came after it doesn't count.


def test_the_command(monkeypatch, capsys, tmp_path):
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    monkeypatch.chdir(tmp_path)

    def command(*options):
        arguments = ["--spec", "spec.json", "--profile", "box", "--workload", LOAD, "--requests", "60"]
        arguments += ["--rate", "5", *options]
        monkeypatch.setattr(sys, "argv", ["neoflex simulate", *arguments])
        simulator.main()
        return capsys.readouterr().out

    found = json.loads(command("--elastic", "1:8", "--json"))
    assert found["threads"]["changes"][0] == [0.0, 8]
    assert 1 <= found["threads"]["mean"] < 8
    assert "8 from 0 s, 4 from " in command("--elastic", "1:8")
    assert "threads" not in json.loads(command("--json"))
    for options, message in (
        (("--elastic", "8:1"), "the least, 8, is above the most, 1"),
        (("--elastic", "8"), "must be LEAST:MOST, is '8'"),
        (("--elastic", "0:8"), "must be from 1 to 1024, is 0"),
        (("--elastic", "1:8", "--policy", "neo"), "argument --elastic: only with the policy neoflex"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command(*options)
        assert message in capsys.readouterr().err
