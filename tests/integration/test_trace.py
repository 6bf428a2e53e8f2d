"""Traces of the real services: every layer of both sub-batches, in the order in which alone it can have been."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from neoflex import Client
from neoflex.cli import trace as command
from neoflex.trace.chrome import to_chrome
from neoflex.trace.record import record
from neoflex.trace.summary import summarize
from svc_common.trace import IterationTrace, TraceKind

NUM_LAYERS = 30
NUM_ITERATIONS = 8
NUM_REQUESTS = 8


def test_a_running_stack(start, prompts):
    stack = start(planner={"mode": "asymmetric"}, gpu={"kv_bytes": "4MiB"}, cpu_attn={"kv_bytes": "256MiB"})
    ids = [str(number) for number in range(NUM_REQUESTS)]
    with ThreadPoolExecutor(NUM_REQUESTS) as pool, Client(stack.address) as client:
        requests = [
            pool.submit(client.generate, token_ids=prompts[-1][i : i + 64], request_id=ids[i], max_tokens=400, seed=i)
            for i in range(NUM_REQUESTS)
        ]
        while client.server_info().counters.asymmetric_iterations < 5:
            assert not any(request.done() for request in requests)
        traces = record(stack.address, 60, NUM_ITERATIONS)
        client.abort(*ids)
        for request in requests:
            request.result()
    assert [after.iteration - before.iteration for before, after in pairwise(traces)] == [1] * (NUM_ITERATIONS - 1)
    assert all(before.end_ns <= after.start_ns for before, after in pairwise(traces))
    two_sub_batches = [trace for trace in traces if len(trace.sub_batches) == 2]
    assert two_sub_batches
    for trace in two_sub_batches:
        assert_in_order(trace)
    summary = summarize(traces)
    assert summary.num_missed == 0
    assert 0 < summary.both_busy_share <= min(summary.gpu_busy_share, summary.cpu_busy_share)
    assert summary.gpu_busy_share + summary.gpu_bubble_share + summary.idle_share == pytest.approx(1)
    assert_lanes(to_chrome(traces))


def assert_in_order(trace: IterationTrace) -> None:
    events = list(trace.events(trace.gpu, *trace.cpu))
    found = {(event.kind, event.layer, event.sub_batch): event for event in events if event.layer >= 0}
    for batch in trace.sub_batches:
        for layer in range(NUM_LAYERS):
            pre = found[TraceKind.PRE_ATTENTION, layer, batch.index]
            post = found[TraceKind.POST_ATTENTION, layer, batch.index]
            if batch.cpu_decodes:
                submit = found[TraceKind.SUBMIT, layer, batch.index]
                attend = found[TraceKind.CPU_ATTEND, layer, batch.index]
                wait = found[TraceKind.WAIT, layer, batch.index]
                assert pre.end_ns <= submit.start_ns < attend.start_ns < wait.end_ns <= post.start_ns
            assert pre.end_ns <= post.start_ns
    assert all(trace.start_ns <= event.start_ns and event.end_ns <= trace.end_ns for event in events)


def assert_lanes(document: dict) -> None:
    lanes: dict[tuple[int, int], list] = {}
    for event in json.loads(json.dumps(document))["traceEvents"]:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(lanes) == 3
    for lane in lanes.values():
        assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(sorted(lane)))


def test_a_stack_of_its_own(tmp_path, monkeypatch, capsys):
    """Where nobody listens: under load, on both processors, and nothing is left."""
    before = set(Path("/dev/shm").glob("demo-of-neoflex-*"))
    monkeypatch.setattr(command, "DEFAULT_ADDRESS", f"unix:{tmp_path / 'nobody'}")
    terminate = signal.getsignal(signal.SIGTERM)
    output = tmp_path / "trace.json"
    command.trace(address=None, seconds=None, iterations=6, output=output, png=None)
    signal.signal(signal.SIGTERM, terminate)
    events = json.loads(output.read_text())["traceEvents"]
    iterations = [event["args"] for event in events if "sub_batches" in event.get("args", {})]
    assert len(iterations) == 6
    assert all(sum(batch["cpu_decodes"] for batch in args["sub_batches"]) > 0 for args in iterations)
    table = capsys.readouterr().out
    assert "cpu_attn_svc busy" in table
    assert set(Path("/dev/shm").glob("demo-of-neoflex-*")) <= before
