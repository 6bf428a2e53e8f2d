"""Every metric of the services. Where vLLM has one of the same meaning, its name after the prefix is the same.

`gen_ai.*` and `http.*` are those of OpenTelemetry's semantic conventions, with the buckets that these advise.
"""

from svc_common.telemetry.declaration import Instrument, Kind

PLANNER, GPU, CPU_ATTN, GATEWAY = SERVICES = "planner_svc", "gpu_svc", "cpu_attn_svc", "gateway_svc"

_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_USAGE = tuple(4**power for power in range(14))
# vLLM's, which go on where those of the conventions end.
_LONG_TTFT_S = (*_TTFT_S, 20, 40, 80, 160, 640, 2560)
_TOKEN_S = (*_TPOT_S, 5, 7.5, 10, 20, 40, 80)
_LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_HTTP_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITERATION_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_ERROR = (0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2, 4)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STEP_S = (1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)

_GEN_AI = (
    "gen_ai.operation.name",
    "gen_ai.provider.name",
    "gen_ai.request.model",
    "gen_ai.response.model",
    "server.address",
    "server.port",
)
_CLASS = "service_class"


def _counter(service: str, name: str, unit: str, text: str, *attributes: str) -> Instrument:
    return Instrument(f"neoflex.{name}", Kind.COUNTER, unit, text, (service,), attributes)


def _gauge(service: str, name: str, unit: str, text: str, *attributes: str) -> Instrument:
    return Instrument(f"neoflex.{name}", Kind.GAUGE, unit, text, (service,), attributes)


def _histogram(
    name: str, unit: str, text: str, bounds: tuple[float, ...], *attributes: str, service: str = PLANNER
) -> Instrument:
    return Instrument(name, Kind.HISTOGRAM, unit, text, (service,), attributes, bounds)


# --- requests, however they came in: the planner sees them all

REQUEST_DURATION = _histogram(
    "gen_ai.server.request.duration",
    "s",
    "From a request's arrival at the planner to its end, refused ones included.",
    _DURATION_S,
    *_GEN_AI,
    "error.type",
)
GEN_AI_TTFT = _histogram(
    "gen_ai.server.time_to_first_token", "s", "From arrival at the planner to the first token.", _TTFT_S, *_GEN_AI
)
GEN_AI_TPOT = _histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Mean time between the tokens of an answer after the first.",
    _TPOT_S,
    *_GEN_AI,
)
TOKEN_USAGE = _histogram(
    "gen_ai.client.token.usage", "{token}", "Tokens of a request.", _USAGE, *_GEN_AI, "gen_ai.token.type"
)
TTFT = _histogram(
    "neoflex.time_to_first_token", "s", "From arrival at the planner to the first token.", _LONG_TTFT_S, _CLASS
)
INTER_TOKEN = _histogram("neoflex.inter_token_latency", "s", "From each token to the next.", _TOKEN_S, _CLASS)
LATENCY = _histogram(
    "neoflex.e2e_request_latency", "s", "From arrival at the planner to the end of the answer.", _LATENCY_S, _CLASS
)
QUEUE_TIME = _histogram(
    "neoflex.request_queue_time", "s", "From arrival to the first plan that has the request.", _LATENCY_S, _CLASS
)
PREFILL_TIME = _histogram(
    "neoflex.request_prefill_time", "s", "From the first plan to the first token.", _LATENCY_S, _CLASS
)
DECODE_TIME = _histogram("neoflex.request_decode_time", "s", "From the first token to the end.", _LATENCY_S, _CLASS)
ACCEPTED = _counter(PLANNER, "accepted_requests", "{request}", "Requests accepted.")
REFUSED = _counter(
    PLANNER, "refused_requests", "{request}", "Requests refused at the door, by the reason of the error.", "reason"
)
FINISHED = _counter(
    PLANNER, "request_success", "{request}", "Answers that ended well, by why.", "finished_reason", _CLASS
)
FAILED = _counter(
    PLANNER,
    "request_failure",
    "{request}",
    "Accepted requests that ended with an error, or whose caller went away, by the reason.",
    "reason",
    _CLASS,
)
BY_SLO = _counter(
    PLANNER,
    "requests_by_slo",
    "{request}",
    "Requests with targets: in_time, late, or refused because they would have been late.",
    "outcome",
    _CLASS,
)
SLO_TARGETS = _counter(
    PLANNER, "slo_targets", "{target}", "Targets, ttft or tpot, that were met or missed.", "kind", "outcome", _CLASS
)

# --- queue and KV

RUNNING = _gauge(PLANNER, "num_requests_running", "{request}", "Requests that hold KV blocks.")
WAITING = _gauge(PLANNER, "num_requests_waiting", "{request}", "Requests that wait for their first or next turn.")
WAITING_BY_REASON = _gauge(
    PLANNER,
    "num_requests_waiting_by_reason",
    "{request}",
    "The same: capacity, for room at the first time; preempted, to be computed again.",
    "reason",
)
MAX_WAITING = _gauge(PLANNER, "max_requests_waiting", "{request}", "Requests that may wait; more are refused.")
BY_CLASS = _gauge(PLANNER, "requests_by_class", "{request}", "Requests in hand: running or waiting.", "state", _CLASS)
KV_USAGE = _gauge(PLANNER, "kv_cache_usage_perc", "{share}", "KV blocks in use on both tiers, of all; up to 1.")
KV_BLOCKS = _gauge(PLANNER, "kv_blocks", "{block}", "KV blocks of a tier, gpu or host, and pool.", "tier", "pool")
KV_BLOCKS_USED = _gauge(PLANNER, "kv_blocks_used", "{block}", "Those that sequences own.", "tier", "pool")
PREEMPTIONS = _counter(PLANNER, "num_preemptions", "{sequence}", "Sequences that lost their place to another.")
PROMPT_TOKENS = _counter(PLANNER, "prompt_tokens", "{token}", "Prompt tokens computed, each once.")
GENERATED_TOKENS = _counter(PLANNER, "generation_tokens", "{token}", "Tokens generated.")
CACHED_TOKENS = _counter(PLANNER, "prefix_cache_hits", "{token}", "Prompt tokens found computed in the prefix cache.")
RECOMPUTED_TOKENS = _counter(PLANNER, "recomputed_tokens", "{token}", "Tokens whose KV had been computed before.")

# --- iterations

ITERATIONS = _counter(
    PLANNER,
    "iterations",
    "{iteration}",
    "Iterations that computed: gpu_only, asymmetric, same_layer or decoupled.",
    "mode",
)
FAILED_ITERATIONS = _counter(PLANNER, "failed_iterations", "{iteration}", "Iterations that failed, by why.", "reason")
EPOCHS_ENDED = _counter(
    PLANNER,
    "epochs_ended",
    "{epoch}",
    "Epochs that ended, by why: executor_lost, executor_stops, engine_failed, host_lost, host_stops, host_back, "
    "failed, policy.",
    "reason",
)
ITERATION_TIME = _histogram(
    "neoflex.iteration.duration", "s", "What iterations took in the executor.", _ITERATION_S, "mode"
)
PREDICTED_TIME = _histogram(
    "neoflex.iteration.predicted_duration", "s", "What the estimator said they would take.", _ITERATION_S, "mode"
)
PREDICTION_RATIO = _histogram(
    "neoflex.iteration.predicted_over_measured", "{ratio}", "The second over the first, of each.", _ERROR, "mode"
)
ITERATION_TOKENS = _histogram(
    "neoflex.iteration_tokens", "{token}", "Tokens that pass the linear operations in an iteration.", _BATCH
)
GPU_TIME = _counter(
    PLANNER,
    "gpu.time",
    "s",
    "Where the executor's time went: busy, wait_cpu (for attention on the CPU), wait_weights (that are streamed), "
    "or idle (no plan). All but busy are bubbles.",
    "state",
)
ATTENDED_TOKENS = _counter(
    PLANNER, "attended_tokens", "{token}", "Context tokens attended by decodes, gpu or cpu.", "device"
)
SWAPPED_BYTES = _counter(PLANNER, "swapped", "By", "KV moved out to the host or in to the GPU.", "direction")
WEIGHT_BYTES = _counter(PLANNER, "streamed_weights", "By", "Weights that were brought to the device.")
PLANNING_TIME = _counter(PLANNER, "planning_time", "s", "Time spent on making plans.")
THREAD_CHANGES = _counter(
    PLANNER, "cpu_attention.thread_changes", "{change}", "Times that the planner gave or took threads.", "direction"
)
CALIBRATION = _gauge(
    PLANNER, "calibration", "{factor}", "What online calibration multiplies each part of the cost by.", "part"
)
HEALTH = _gauge(PLANNER, "health", "{boolean}", "1 where the check, readiness or liveness, holds, else 0.", "check")

# --- of iterations that are traced, one every telemetry.layer_sample_s

LAYER_TIME = _histogram(
    "neoflex.layer.duration", "s", "Steps of one layer, in the executor and on the CPU's side.", _STEP_S, "step"
)
HOP_LATENCY = _histogram(
    "neoflex.hop.latency",
    "s",
    "Between executor and CPU attention, of a layer for which the other side waited: from q, k and v handed over until "
    "attention begins (to_cpu), and from its end until the executor goes on (to_gpu).",
    _STEP_S,
    "direction",
)

# --- gpu_svc

GPU_MEMORY = _gauge(GPU, "gpu.memory", "By", "Of the device: weights, or kv_cache.", "use")
MODEL_LAYERS = _gauge(GPU, "model_layers", "{layer}", "Layers that are resident on the device, or streamed.", "place")

# --- cpu_attn_svc

THREADS = _gauge(CPU_ATTN, "cpu_attention.threads", "{thread}", "Threads that compute.")
MAX_THREADS = _gauge(CPU_ATTN, "cpu_attention.max_threads", "{thread}", "Most that it may be given.")
CPU_ITERATIONS = _counter(CPU_ATTN, "cpu_attention.iterations", "{iteration}", "Iterations with work for this service.")
CPU_TIME = _counter(
    CPU_ATTN,
    "cpu_attention.time",
    "s",
    "While a region is open: busy, waiting (within an iteration, for the executor), or idle. All but busy are bubbles.",
    "state",
)
POOL_SIZE = _gauge(CPU_ATTN, "cpu_attention.pool", "By", "The pool of host KV that is open.")
HUGE_PAGES = _gauge(CPU_ATTN, "cpu_attention.huge_pages", "By", "Of the shared region, what lies in huge pages.")

# --- gateway_svc

HTTP_DURATION = _histogram(
    "http.server.request.duration",
    "s",
    "From an HTTP request's arrival to the end of its answer.",
    _HTTP_S,
    "http.request.method",
    "http.route",
    "http.response.status_code",
    "error.type",
    service=GATEWAY,
)
HTTP_ACTIVE = Instrument(
    "http.server.active_requests", Kind.GAUGE, "{request}", "HTTP requests that run now.", (GATEWAY,)
)

# --- every service

CPU_SECONDS = Instrument(
    "process.cpu.time",
    Kind.COUNTER,
    "s",
    "CPU time of the process; its rate is the cores in use.",
    SERVICES,
    ("cpu.mode",),
)
RESIDENT_BYTES = Instrument(
    "process.memory.usage", Kind.GAUGE, "By", "Resident memory, the shared region included.", SERVICES
)

INSTRUMENTS: tuple[Instrument, ...] = tuple(value for value in list(vars().values()) if isinstance(value, Instrument))
"""All, in the order above."""


def instruments_of(service: str) -> tuple[Instrument, ...]:
    """Those that a service has."""
    return tuple(instrument for instrument in INSTRUMENTS if service in instrument.services)
