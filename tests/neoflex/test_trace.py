"""Sums, Perfetto JSON and picture of traces, and the command that records them from a scripted server."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.command import Run
from support.inference import InferenceServer
from support.traces import by_two_services, decoupled, gpu_only, pipelined

from neoflex.cli import trace as command
from neoflex.trace.chrome import CPU_PID, GPU_PID, LINK_PID, to_chrome
from neoflex.trace.picture import draw
from neoflex.trace.record import record
from neoflex.trace.summary import IterationTimes, ServiceTimes, summarize, times_of
from svc_common.plan import Mode
from svc_common.trace import IterationTrace, TraceEvents, TraceKind

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
TIMES = IterationTimes(
    total_ns=100,
    gpu_busy_ns=100 - 13 - 6 - 4,
    cpu_busy_ns=17 + 22,
    both_busy_ns=7 + 15,
    gpu_bubble_ns=13 + 6 + 4,
    services={0: ServiceTimes(17 + 22, 20 + 0)},
    # Copies in, noticed down, noticed up; the second was there before the CPU looked.
    hops_ns=(2 + 3 + 3, 2 + 0 + 2),
)


def three_iterations() -> list[IterationTrace]:
    """50 ns without a plan after the first; iteration 3 did not arrive."""
    return [pipelined(1, 10_000), gpu_only(2, 10_150), pipelined(4, 10_250, unit_ns=3)]


def with_link(trace: IterationTrace) -> IterationTrace:
    """Two layers came meanwhile."""
    kinds = (int(TraceKind.WEIGHT_COPY),) * 2
    return replace(trace, link=TraceEvents(kinds, (4, 5), (-1, -1), (10, 50), (30, 40)))


class TestSummary:
    def test_one_iteration(self) -> None:
        assert times_of(pipelined(1, 10_000)) == TIMES

    def test_without_the_cpu(self) -> None:
        times = times_of(gpu_only(1, 5))
        assert (times.gpu_busy_ns, times.cpu_busy_ns, times.both_busy_ns, times.hops_ns) == (100, 0, 0, ())

    def test_a_replayed_graph_has_no_hops(self) -> None:
        eager = pipelined(1, 10_000)
        replay = TraceEvents((int(TraceKind.REPLAY), int(TraceKind.REPORT)), (-1, -1), (-1, -1), (0, 70), (70, 30))
        times = times_of(replace(eager, gpu=replay))
        assert (times.gpu_busy_ns, times.gpu_bubble_ns, times.hops_ns) == (70, 30, ())
        assert times.cpu_busy_ns == TIMES.cpu_busy_ns

    def test_many(self) -> None:
        summary = summarize(three_iterations())
        assert (summary.num_iterations, summary.num_missed) == (3, 1)
        assert summary.num_by_mode == {Mode.ASYMMETRIC: 2, Mode.GPU_ONLY: 1}
        assert summary.wall_ns == 550
        assert summary.idle_share == pytest.approx(50 / 550)
        assert summary.gpu_busy_share == pytest.approx((77 + 100 + 3 * 77) / 550)
        assert summary.gpu_bubble_share == pytest.approx((23 + 3 * 23) / 550)
        assert summary.cpu_busy_share == pytest.approx(4 * 39 / 550)
        assert summary.services == {"cpu_attn_svc": pytest.approx((4 * 39 / 550, 4 * 20 / 550))}
        assert summary.both_busy_share == pytest.approx(4 * 22 / 550)
        assert summary.neither_busy_share == pytest.approx((50 + 4 * (100 - 77 - 39 + 22)) / 550)
        assert summary.hop_p50_ns == (8 + 12) / 2  # Of 4, 8, 12, 24.
        assert summary.hop_share == pytest.approx(48 / 550)
        assert summary.slowest.iteration == 4
        assert summary.median.total_ns == 100

    def test_a_cohort_beside_a_batch(self) -> None:
        assert times_of(decoupled(1, 10_000)) == IterationTimes(
            total_ns=100,
            gpu_busy_ns=100 - 7 - 2,
            cpu_busy_ns=45,
            both_busy_ns=40,
            gpu_bubble_ns=7 + 2,
            services={0: ServiceTimes(45, 12)},
            hops_ns=(3 + 2 + 2,),
        )

    def test_two_services(self) -> None:
        """Executor busy: 0 to 32, 45 to 60, 66 to 80, 84 to 100. Services: 25 to 64 and 26 to 44, 50 to 58."""
        times = times_of(by_two_services(1, 10_000))
        assert times.services == {0: ServiceTimes(17 + 22, 20), 2: ServiceTimes(18 + 8, 20 + 6)}
        assert (times.cpu_busy_ns, times.both_busy_ns) == (64 - 25, 7 + 15)
        # Of sub-batch 1 by the second service, of 0 by the first.
        assert times.hops_ns == (2 + (26 - 22) + (45 - 44), 2 + 0 + 2)
        summary = summarize([by_two_services(1, 10_000), pipelined(2, 10_100)])
        assert summary.services == {
            "cpu_attn_svc 0": pytest.approx((78 / 200, 40 / 200)),
            "cpu_attn_svc 2": pytest.approx((26 / 200, 26 / 200)),
        }

    def test_predictions(self) -> None:
        durations = summarize(three_iterations())
        assert (durations.num_predicted, durations.error_p50, durations.error_p95) == (0, 0.0, 0.0)
        predicted = [replace(t, predicted_ns=ns) for t, ns in zip(three_iterations(), (110, 0, 240), strict=True)]
        summary = summarize(predicted)  # They lasted 100, 100 and 300; the second was not predicted.
        assert summary.num_predicted == 2
        assert summary.error_p50 == pytest.approx((0.1 + 0.2) / 2)
        assert summary.error_p95 == pytest.approx(0.2)
        assert summary.predicted_share == pytest.approx(350 / 400)

    def test_iterations_of_two_epochs_are_not_counted_as_missed(self) -> None:
        other = IterationTrace(2, 1, gpu_only(1, 0).mode, 20_000, 10)
        assert summarize([pipelined(7, 10_000), other]).num_missed == 0


class TestChrome:
    def test_lanes_hold_complete_events_without_overlap(self) -> None:
        events = json.loads(json.dumps(to_chrome(three_iterations())))["traceEvents"]
        complete = [event for event in events if event["ph"] == "X"]
        assert {event["ph"] for event in events} == {"X", "M"}
        assert all({"name", "ts", "dur", "pid", "tid", "args"} <= set(event) for event in complete)
        lanes: dict[tuple[int, int], list[Any]] = {}
        for event in complete:
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
        assert len(lanes) == 3
        for lane in lanes.values():
            lane.sort(key=lambda event: (event["ts"], event["ts"] + event["dur"]))
            for before, after in pairwise(lane):
                assert before["ts"] + before["dur"] <= after["ts"] + 1e-6

    def test_what_events_say(self) -> None:
        events = to_chrome(three_iterations())["traceEvents"]
        [attend] = [
            e for e in events if e["name"] == "attend" and e["args"] == {"iteration": 1, "layer": 0, "sub_batch": 1}
        ]
        assert (attend["pid"], attend["ts"], attend["dur"]) == (CPU_PID, 0.025, 0.017)
        [idle] = [event for event in events if event["name"] == "idle"]
        assert (idle["pid"], idle["ts"], idle["dur"]) == (GPU_PID, 0.1, 0.05)
        [iteration] = [event for event in events if event["name"] == "4: asymmetric"]
        assert (iteration["ts"], iteration["dur"]) == (0.25, 0.3)
        assert iteration["args"]["sub_batches"][1] == {
            "index": 1,
            "prefill_tokens": 0,
            "gpu_decodes": 0,
            "cpu_decodes": 2,
            "cpu_context_tokens": 90,
        }

    def test_a_cohort_has_its_name(self) -> None:
        events = to_chrome([decoupled(3, 5)])["traceEvents"]
        [attend] = [event for event in events if event["name"] == "attend"]
        assert attend["args"] == {"iteration": 3, "layer": 4, "sub_batch": "cohort"}
        [iteration] = [event for event in events if event["name"] == "3: decoupled"]
        assert [batch["index"] for batch in iteration["args"]["sub_batches"]] == [0, "cohort"]
        pre = [event["args"]["sub_batch"] for event in events if event["name"] == "pre-attention"]
        assert pre == ["cohort", 0]

    def test_lanes_are_named(self) -> None:
        names = [e["args"]["name"] for e in to_chrome([gpu_only(1, 5)])["traceEvents"] if e["name"] == "process_name"]
        assert names == ["gpu_svc", "gpu_svc", "cpu_attn_svc"]

    def test_each_service_has_a_lane(self) -> None:
        events = to_chrome([by_two_services(1, 5), gpu_only(2, 500)])["traceEvents"]
        names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name" and e["pid"] != GPU_PID}
        assert names == {CPU_PID: "cpu_attn_svc 0", CPU_PID + 2: "cpu_attn_svc 2"}
        attended = [(e["pid"], e["args"]["sub_batch"], e["ts"]) for e in events if e["name"] == "attend"]
        first = [(CPU_PID, 1, 0.025), (CPU_PID, 0, 0.042)]
        assert attended == [*first, (CPU_PID + 2, 1, 0.026), (CPU_PID + 2, 0, 0.050)]

    def test_the_link_has_a_lane_where_weights_crossed_it(self) -> None:
        events = to_chrome([with_link(gpu_only(1, 5))])["traceEvents"]
        assert [e["args"]["name"] for e in events if e["name"] == "process_name"][-1] == "link"
        came = [event for event in events if event["name"] == "weights"]
        assert {event["pid"] for event in came} == {LINK_PID}
        assert [(e["args"]["layer"], e["ts"], e["dur"]) for e in came] == [(4, 0.010, 0.030), (5, 0.050, 0.040)]


@pytest.mark.parametrize(
    "traces",
    [
        three_iterations(),
        [gpu_only(1, 5)],
        [pipelined(n, 1000 * n) for n in range(1, 9)],
        [decoupled(1, 5), pipelined(2, 500)],
        [decoupled(1, 5, with_batch=False)],
        [with_link(gpu_only(1, 5)), pipelined(2, 500)],
        [gpu_only(1, 5), with_link(by_two_services(2, 500))],
    ],
)
def test_a_picture_of_whatever_ran(traces: list[IterationTrace], tmp_path: Path) -> None:
    path = tmp_path / "timeline"
    draw(traces, summarize(traces), path)
    assert path.read_bytes().startswith(PNG_SIGNATURE)


class TestRecord:
    def test_as_many_as_are_wanted(self, server: InferenceServer) -> None:
        server.traces.traces = three_iterations()
        assert record(server.address, 60, 2) == three_iterations()[:2]

    def test_for_some_time(self, server: InferenceServer) -> None:
        server.traces.traces = three_iterations()
        assert record(server.address, 0.5) == three_iterations()


class TestCommand:
    def test_json_picture_and_table(self, run: Run, server: InferenceServer, tmp_path: Path) -> None:
        server.traces.traces = three_iterations()
        output, png = tmp_path / "out.json", tmp_path / "out.png"
        options = ["--address", server.address, "--iterations", "3", "--output", str(output), "--png", str(png)]
        ended = run("trace", *options)
        assert ended.code == 0
        assert json.loads(output.read_text()) == to_chrome(three_iterations())
        assert png.read_bytes().startswith(PNG_SIGNATURE)
        rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in ended.out.splitlines() if "│" in line]
        assert ["iterations", "3, 1 more missed in 0.00 s"] in rows
        assert ["by mode", "2 asymmetric, 1 gpu_only"] in rows
        assert ["gpu_svc busy", "74.2%"] in rows
        assert ["all hops", "8.7%"] in rows
        assert str(output) in ended.err

    def test_a_row_for_each_service(self, run: Run, server: InferenceServer, tmp_path: Path) -> None:
        server.traces.traces = [by_two_services(1, 10_000)]
        options = ["--iterations", "1", "--output", str(tmp_path / "out.json")]
        ended = run("trace", "--address", server.address, *options)
        rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in ended.out.splitlines() if "│" in line]
        assert ["cpu_attn_svc 0 busy", "39.0%"] in rows
        assert ["cpu_attn_svc 2 waiting for a submit", "26.0%"] in rows

    def test_an_idle_server(self, run: Run, server: InferenceServer, tmp_path: Path) -> None:
        server.traces.traces = []
        output = tmp_path / "out.json"
        ended = run("trace", "--address", server.address, "--seconds", "0.1", "--output", str(output))
        assert ended.code == 1
        assert f"error: no iteration ran at {server.address} within 0.1 s" in ended.err
        assert not output.exists()

    def test_nobody_there(self, run: Run, tmp_path: Path) -> None:
        ended = run("trace", "--address", "127.0.0.1:1", "--output", str(tmp_path / "out.json"))
        assert ended.code == 1
        assert "nobody listens at 127.0.0.1:1; start a server with: neoflex up" in ended.err

    @pytest.mark.parametrize("option", ["--output", "--png"])
    def test_what_cannot_be_written_is_said_first(
        self, run: Run, server: InferenceServer, tmp_path: Path, option: str
    ) -> None:
        missing = tmp_path / "nowhere" / "file"
        options = {"--output": str(tmp_path / "out.json"), option: str(missing)}
        ended = run("trace", "--address", server.address, *(word for pair in options.items() for word in pair))
        assert ended.code == 2
        assert f"Invalid value for {option}: cannot write {missing}: No such file or directory" in ended.err
        assert "recording" not in ended.err
        assert list(tmp_path.iterdir()) == []

    def test_a_server_that_runs_here_is_found(
        self, run: Run, server: InferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(command, "DEFAULT_ADDRESS", server.address)
        server.traces.traces = three_iterations()
        output = tmp_path / "out.json"
        ended = run("trace", "--iterations", "1", "--output", str(output))
        assert ended.code == 0
        assert f"recording at most 60 s, 1 iterations, at {server.address}" in ended.err
