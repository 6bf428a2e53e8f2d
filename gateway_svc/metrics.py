"""What /metrics shows: HTTP requests as this process sees them, and the server's counters and load at the scrape.

Names of latencies and tokens are those of the GenAI semantic conventions, as OpenTelemetry writes them for Prometheus.
Where vLLM has a gauge or counter of the same meaning, its name after the prefix is the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from neoflex.v1 import inference_pb2 as pb

_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_TOKENS = tuple(4**power for power in range(14))
_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")
_PROVIDER = "neoflex"


@dataclass(slots=True)
class Outcome:
    """How a request came out; filled by those who learn it."""

    status: int = 0
    operation: str = ""
    """"chat" or "text_completion", where it is a generation that was accepted as one."""
    model: str = ""
    error: str = ""
    """OpenAI's code of a failure, or "client_disconnected"."""

    def client_gone(self) -> None:
        """The caller hung up before the end. Counted as nginx does; nobody receives that status."""
        self.status, self.error = 499, "client_disconnected"


class Metrics:
    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # A third of the text, and nobody draws it.
        registry = CollectorRegistry()
        self._registry = registry
        self._server = _ServerCollector()
        registry.register(self._server)
        self.in_flight = Gauge("neoflex_http_requests_in_flight", "HTTP requests that run now.", registry=registry)
        self._requests = Counter(
            "neoflex_http_requests", "HTTP requests that ended.", ("route", "method", "status"), registry=registry
        )
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "From a request's arrival at the gateway to the end of its answer.",
            (*_GEN_AI, "error_type"),
            buckets=_DURATION_S,
            registry=registry,
        )
        self._ttft = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From a request's arrival at the planner to its first token.",
            _GEN_AI,
            buckets=_TTFT_S,
            registry=registry,
        )
        self._tpot = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time between the tokens of an answer after the first.",
            _GEN_AI,
            buckets=_TPOT_S,
            registry=registry,
        )
        self._tokens = Histogram(
            "gen_ai_client_token_usage",
            "Tokens of a request.",
            (*_GEN_AI, "gen_ai_token_type"),
            buckets=_TOKENS,
            registry=registry,
        )
        self._finished = Counter(
            "neoflex_request_success", "Answers that ended, by why.", ("finished_reason",), registry=registry
        )

    def ended(self, route: str, method: str, outcome: Outcome, duration_s: float) -> None:
        self._requests.labels(route, method, outcome.status).inc()
        if outcome.operation:
            self._duration.labels(*_labels(outcome), outcome.error).observe(duration_s)

    def answered(self, outcome: Outcome, usage: pb.Usage, finish_reason: str) -> None:
        """One answer of a request ended."""
        labels = _labels(outcome)
        self._finished.labels(finish_reason).inc()
        self._tokens.labels(*labels, "input").observe(usage.prompt_tokens)
        self._tokens.labels(*labels, "output").observe(usage.completion_tokens)
        if usage.completion_tokens > 0:
            self._ttft.labels(*labels).observe(usage.time_to_first_token_ns / 1e9)
        if usage.completion_tokens > 1:
            rest_ns = usage.duration_ns - usage.time_to_first_token_ns
            self._tpot.labels(*labels).observe(rest_ns / 1e9 / (usage.completion_tokens - 1))

    def exposition(self, server: tuple[pb.GetServerInfoResponse, pb.GetLoadResponse] | None) -> bytes:
        """Prometheus text. `server`: as of now; None where the planner does not answer."""
        self._server.now = server
        return generate_latest(self._registry)


def _labels(outcome: Outcome) -> tuple[str, str, str, str]:
    return outcome.operation, _PROVIDER, outcome.model, outcome.model


class _ServerCollector(Collector):
    """The planner's own figures, taken at each scrape."""

    def __init__(self) -> None:
        self.now: tuple[pb.GetServerInfoResponse, pb.GetLoadResponse] | None = None

    def describe(self) -> list[Metric]:
        """Registering it must not ask for figures that there are not yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield _gauge("up", "Whether the planner answers.", 0 if self.now is None else 1)
        if self.now is not None:
            info, load = self.now
            yield from _load_metrics(load)
            yield from _placement_metrics(info)
            yield from _counter_metrics(info.counters)
            yield _slo_metric(info)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"neoflex_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"neoflex_{name}", text, value)


def _load_metrics(load: pb.GetLoadResponse) -> Iterator[Metric]:
    yield _gauge("num_requests_running", "Requests that hold KV blocks.", load.running_requests)
    yield _gauge("num_requests_waiting", "Requests that wait for their first or next turn.", load.waiting_requests)
    total = load.gpu_blocks_total + load.host_blocks_total
    used = load.gpu_blocks_used + load.host_blocks_used
    yield _gauge("kv_cache_usage_perc", "Share of KV blocks in use on both tiers, up to 1.", used / max(1, total))
    for name, text, values in (
        ("kv_blocks_used", "KV blocks in use.", (load.gpu_blocks_used, load.host_blocks_used)),
        ("kv_blocks", "KV blocks.", (load.gpu_blocks_total, load.host_blocks_total)),
    ):
        family = GaugeMetricFamily(f"neoflex_{name}", text, labels=("tier",))
        for tier, value in zip(("gpu", "host"), values, strict=True):
            family.add_metric((tier,), value)
        yield family


def _placement_metrics(info: pb.GetServerInfoResponse) -> Iterator[Metric]:
    yield _gauge("cpu_attention_threads", "Threads that compute attention on the CPU.", info.cpu_attention_threads)


def _counter_metrics(counters: pb.ServerCounters) -> Iterator[Metric]:
    yield _counter("num_preemptions", "Sequences that lost their place on the GPU.", counters.preemptions)
    yield _counter("prompt_tokens", "Prompt tokens computed.", counters.prefilled_tokens)
    yield _counter("generation_tokens", "Tokens generated.", counters.generated_tokens)
    yield _counter("recomputed_tokens", "Tokens whose KV was computed again.", counters.recomputed_tokens)
    yield _counter("accepted_requests", "Requests accepted.", counters.accepted_requests)
    yield _counter("finished_requests", "Requests that ended, however.", counters.finished_requests)
    yield _counter("refused_requests", "Requests refused at the door.", counters.refused_requests)
    modes = ("gpu_only", "asymmetric", "same_layer", "decoupled")
    yield _by("iterations", "Iterations.", "mode", {mode: getattr(counters, f"{mode}_iterations") for mode in modes})
    attended = {"gpu": counters.gpu_attended_tokens, "cpu": counters.cpu_attended_tokens}
    yield _by("attended_tokens", "Context tokens attended by decodes.", "device", attended)
    swapped = {"out": counters.swapped_out_bytes, "in": counters.swapped_in_bytes}
    yield _by("swapped_bytes", "Bytes of KV moved between GPU and host.", "direction", swapped)
    times = {
        "executor_busy": counters.executor_busy_ns / 1e9,
        "cpu_wait": counters.cpu_wait_ns / 1e9,
        "cpu_attention": counters.cpu_attention_ns / 1e9,
        "planning": counters.planning_ns / 1e9,
    }
    yield _by("seconds", "Seconds spent.", "what", times)


def _slo_metric(info: pb.GetServerInfoResponse) -> Metric:
    family = CounterMetricFamily("neoflex_requests_by_slo", "Requests with targets.", labels=("class", "outcome"))
    for item in info.service_classes:
        for outcome in ("in_time", "late", "refused"):
            family.add_metric((item.name, outcome), getattr(item, f"requests_{outcome}"))
    return family


def _by(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"neoflex_{name}", text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family
