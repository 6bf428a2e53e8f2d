"""The load client: what it sends, what it counts, and what it says of a server that refuses or breaks."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import Run
from support.inference import InferenceServer
from support.openai_stand_in import StandIn, stand_in

from neoflex.bench.load import Sent, send_at_times, send_in_turn
from neoflex.bench.record import Outcome, Record
from neoflex.bench.summary import Percentiles, Targets, summarize
from svc_common.workloads import Arrival


@pytest.fixture
def openai_server() -> Iterator[StandIn]:
    with stand_in() as server:
        yield server


class CountingTarget:
    """Holds each request until as many are under way as ever will be."""

    vocabulary_size = 1000

    def __init__(self, most: int) -> None:
        self.prompts: list[list[int]] = []
        self.running = self.most_running = 0
        self._most = most
        self._full = asyncio.Event()

    async def run(self, prompt: list[int], arrival: Arrival, record: Record) -> None:
        self.prompts.append(prompt)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if self.running == self._most:
            self._full.set()
        await self._full.wait()
        await asyncio.sleep(0)
        self.running -= 1
        record.outcome, record.output_tokens = Outcome.FINISHED, arrival.output_tokens
        record.piece_s = [record.due_s + 1.0]

    async def aclose(self) -> None:
        pass


def finished(due_s: float, *piece_s: float) -> Record:
    return Record(due_s, 10, list(piece_s), len(piece_s), Outcome.FINISHED)


# --- counting


def test_latencies_of_one_request() -> None:
    record = finished(1.0, 1.5, 1.75, 2.5)
    assert (record.ttft_s, record.tpot_s, record.end_to_end_s) == (0.5, 0.5, 1.5)
    assert record.gaps_s == [0.25, 0.75]
    assert record.is_in_time(0.5, 0.5)
    assert not record.is_in_time(0.5, 0.49)
    assert not record.is_in_time(0.49, 0.5)


def test_one_token_has_no_pace_and_misses_none() -> None:
    record = finished(0.0, 0.5)
    assert record.tpot_s is None
    assert record.is_in_time(0.5, 0.0)


def test_summary_counts_what_was_refused_and_what_failed() -> None:
    refused = Record(0.0, 10, outcome=Outcome.REFUSED, error="QUEUE_FULL")
    failed = Record(0.0, 10, [0.1], 1, Outcome.FAILED, "UNAVAILABLE")
    sent = Sent([finished(0.0, 1.0, 2.0), finished(0.0, 3.0, 4.0), refused, failed], duration_s=4.0)
    summary = summarize(sent, "8 concurrent", 8, Targets(ttft_s=2.0, tpot_s=1.0))
    assert (summary.num_requests, summary.num_finished, summary.num_refused, summary.num_failed) == (4, 2, 1, 1)
    assert summary.errors == {"QUEUE_FULL": 1, "UNAVAILABLE": 1}
    assert (summary.requests_per_s, summary.output_tokens_per_s, summary.total_tokens_per_s) == (0.5, 1.0, 6.0)
    assert summary.ttft == Percentiles(mean=2.0, p50=2.0, p90=2.8, p95=pytest.approx(2.9), p99=pytest.approx(2.98))
    assert (summary.in_time, summary.goodput_per_s) == (0.25, 0.25)


def test_of_no_finished_request_there_are_no_latencies() -> None:
    summary = summarize(Sent([Record(0.0, 1)], 1.0), "", 1, None)
    assert (summary.ttft, summary.tpot, summary.in_time) == (None, None, None)


# --- sending


async def test_clients_in_turn_keep_to_their_number() -> None:
    target, done = CountingTarget(3), []
    arrivals = [Arrival(0.0, number + 1, 2) for number in range(10)]
    sent = await send_in_turn(target, arrivals, 3, 0, lambda: done.append(1))
    assert target.most_running == 3
    assert len(done) == len(sent.records) == 10
    assert [len(prompt) for prompt in target.prompts] == list(range(1, 11))
    assert all(256 <= token < 1000 for prompt in target.prompts for token in prompt)


async def test_requests_go_out_at_their_times_whatever_runs() -> None:
    target = CountingTarget(5)
    arrivals = [Arrival(number / 1e3, 4, 2) for number in range(5)]
    sent = await send_at_times(target, arrivals, 0, lambda: None)
    assert target.most_running == 5
    dues = [record.due_s - sent.records[0].due_s for record in sent.records]
    assert dues == pytest.approx([0.0, 0.001, 0.002, 0.003, 0.004])


# --- the command


def test_grpc_server(server: InferenceServer, run: Run, tmp_path: Path) -> None:
    png = tmp_path / "bench.png"
    ended = run(
        *("bench", "--address", server.address, "--workload", "poisson:requests=4,prompt=6,output=3,class=chat"),
        *("--rate", "0,1000", "--ttft", "60", "--tpot", "60", "--json", "--png", str(png)),
    )
    assert ended.code == 0, ended.err
    runs = [json.loads(line) for line in ended.out.splitlines()]
    assert [run["load"] for run in runs] == ["all at once", "1e+03 requests/s"]
    for found in runs:
        assert (found["num_finished"], found["num_failed"], found["in_time"]) == (4, 0, 1.0)
        assert found["output_tokens_per_s"] == pytest.approx(3 * found["requests_per_s"])
    assert server.servicer.last_request is not None
    request = server.servicer.last_request
    assert len(request.token_ids.ids) == 6
    assert request.stopping.ignore_eos
    assert request.stopping.max_tokens == 3
    assert request.service_class == "chat"
    assert png.read_bytes().startswith(b"\x89PNG")


def test_http_server(openai_server: StandIn, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    ended = run(
        *("bench", "--http", openai_server.url, "--workload", "poisson:requests=5,prompt=7,output=4"),
        *("--concurrency", "2", "--warm-up", "1", "--json"),
    )
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert (found["num_requests"], found["num_finished"], found["load"]) == (5, 5, "2 concurrent")
    assert found["total_tokens_per_s"] == pytest.approx(11 * found["requests_per_s"])
    assert len(openai_server.bodies) == 6
    body = openai_server.bodies[-1]
    assert (body["model"], len(body["prompt"]), body["max_tokens"], body["ignore_eos"]) == ("tiny", 7, 4, True)
    assert openai_server.authorizations[-1] == "Bearer secret"


def test_refusals_and_broken_streams_are_told_apart(openai_server: StandIn, run: Run) -> None:
    arguments = ("bench", "--http", openai_server.url, "--workload", "poisson:requests=2,prompt=2,output=3", "--json")
    openai_server.status = 429
    ended = run(*arguments)
    found = json.loads(ended.out)
    assert (found["num_refused"], found["num_failed"], found["errors"]) == (2, 0, {"HTTP 429": 2})
    assert ended.code == 1
    openai_server.status, openai_server.ends_early = 200, True
    found = json.loads(run(*arguments).out)
    assert (found["num_refused"], found["num_failed"], found["errors"]) == (0, 2, {"EXECUTOR_LOST": 2})


def test_the_table_shows_each_run(server: InferenceServer, run: Run) -> None:
    ended = run("bench", "--address", server.address, "--requests", "3", "--concurrency", "1,2")
    assert ended.code == 0, ended.err
    assert "1 concurrent" in ended.out
    assert "2 concurrent" in ended.out
    assert "3 of 3" in ended.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "1", "--concurrency", "1"), "give either --rate or --concurrency"),
        (("--rate", "fast"), "must be a number or NUMBERx, is 'fast'"),
        (("--rate", "2x"), "2x: the workload has no recorded times"),
        (("--rate", "nan"), "must be from 0 to 1e+06, is nan"),
        (("--concurrency", "0"), "must be from 1 to 4096, is '0'"),
        (("--ttft", "1"), "--ttft and --tpot need each other"),
        (("--workload", "no-such-file"), "no-such-file: No such file"),
        (("--workload", "poisson:prompt=x"), "prompt: must be a number, is 'x'"),
    ],
)
def test_bad_arguments_are_named(run: Run, arguments: tuple[str, ...], message: str) -> None:
    ended = run("bench", *arguments)
    assert ended.code == 2
    assert message in " ".join(ended.err.replace("│", " ").split())


def test_nobody_listens(run: Run) -> None:
    assert "nobody listens at 127.0.0.1:1" in run("bench", "--address", "127.0.0.1:1").err
    ended = run("bench", "--http", "http://127.0.0.1:1/v1")
    assert ended.code == 1
    assert "http://127.0.0.1:1/v1/models" in ended.err
