"""Whether every mode yields the tokens of device "cpu", with a tiny model in fp32."""

import traceback
from collections.abc import Callable
from functools import partial
from itertools import count

import torch

from gpu_check import absent
from gpu_check.choices import NO_GRAPHS, NO_STREAM, Heard, captured, captured_text, report_host
from gpu_check.driver import Driver
from gpu_check.host import Worker, cpu_attention
from gpu_check.model import TINY, TinyCheckpoint, cpu_decoder, gpu_decoder, make_executor, sixteen_bits
from gpu_check.rows import Report
from gpu_check.setting import Setting
from gpu_svc.executor import Executor
from gpu_svc.limits import Limits
from svc_common.decoder.decoder import Decoder
from svc_common.plan import Mode, Sampling, SubBatch, Tier

NUM_TOKENS = 10
"""Of each answer."""
PROMPTS = {
    i: tuple((i * 53 + j * 31 + j * j) % TINY.vocab_size for j in range(num))
    for i, num in enumerate((21, 3, 40, 9), start=1)
}
LIMITS = Limits(max_sequences=8, max_batch_tokens=64, max_sequence_tokens=128)
_BLOCK_TOKENS = 16
_NUM_BLOCKS = 64
_CHUNK_TOKENS = 16
_LOGPROB_ERROR = 0.1
"""Mean, of a prompt's log-probabilities in 16 bits against fp32."""


def tiny_executor(decoder: Decoder, host_kv_bytes: int = 0, graphs: bool = False) -> Executor:
    return make_executor(decoder, _BLOCK_TOKENS, _NUM_BLOCKS, host_kv_bytes, graphs)


def gpu_only_tokens(decoder: Decoder) -> dict[int, list[int]]:
    """The answers to PROMPTS, all on the device."""
    executor = tiny_executor(decoder)
    driver = Driver(executor, LIMITS)
    gpu_only(driver)
    executor.close()
    return driver.tokens


def gpu_only(driver: Driver) -> None:
    _prefill(driver, dict.fromkeys(PROMPTS, Tier.GPU))
    for _ in range(NUM_TOKENS - 1):
        driver.run(SubBatch(gpu_decodes=(1, 2, 3, 4)), mode=Mode.GPU_ONLY)


def asymmetric(driver: Driver) -> None:
    _prefill(driver, _HALF)
    batches = SubBatch(gpu_decodes=(1, 2), cpu_decodes=(3,)), SubBatch(cpu_decodes=(4,))
    for _ in range(NUM_TOKENS - 1):
        driver.run(*batches, mode=Mode.ASYMMETRIC)


def same_layer(driver: Driver) -> None:
    _prefill(driver, _HALF)
    for _ in range(NUM_TOKENS - 1):
        driver.run(SubBatch(gpu_decodes=(1, 2), cpu_decodes=(3, 4)), mode=Mode.SAME_LAYER)


def decoupled(driver: Driver) -> None:
    """The cohort's steps take one iteration, two or four; the batch ends first, and the cohort goes on alone."""
    _prefill(driver, _HALF)
    parts = [(TINY.num_layers,), (1, TINY.num_layers - 1), (1,) * TINY.num_layers]
    left = NUM_TOKENS - 1
    for step in range(NUM_TOKENS - 1):
        part = parts[step % len(parts)] if left >= TINY.num_layers else (TINY.num_layers,)
        busy = left >= len(part)
        driver.step_cohort((3, 4), part, SubBatch(gpu_decodes=(1, 2) if busy else ()))
        left -= len(part) if busy else 0
    for _ in range(left):
        driver.run(SubBatch(gpu_decodes=(1, 2)), mode=Mode.GPU_ONLY)


def swapped(driver: Driver) -> None:
    """All begin on the device, go to the host, and come back."""
    _prefill(driver, dict.fromkeys(PROMPTS, Tier.GPU))
    ids = tuple(PROMPTS)
    for number in range(NUM_TOKENS - 1):
        target = {3: Tier.HOST, 6: Tier.GPU}.get(number)
        swaps = tuple(driver.swap(i, target, len(PROMPTS[i]) + NUM_TOKENS) for i in ids) if target else ()
        if 3 <= number < 6:
            driver.run(SubBatch(cpu_decodes=ids), mode=Mode.SAME_LAYER, swaps=swaps)
        else:
            driver.run(SubBatch(gpu_decodes=ids), mode=Mode.GPU_ONLY, swaps=swaps)


_HALF = {1: Tier.GPU, 2: Tier.GPU, 3: Tier.HOST, 4: Tier.HOST}
MODES: dict[str, Callable[[Driver], None]] = {
    "GPU-only": gpu_only,
    "asymmetric": asymmetric,
    "same-layer overlap": same_layer,
    "decoupled cohort": decoupled,
    "swap out and in": swapped,
}


def _prefill(driver: Driver, tiers: dict[int, Tier]) -> None:
    for sequence_id, tier in tiers.items():
        driver.prefill(sequence_id, PROMPTS[sequence_id], tier, NUM_TOKENS, _CHUNK_TOKENS)


def compare(
    report: Report, what: str, tokens: dict[int, list[int]], expected: dict[int, list[int]], note: str = ""
) -> None:
    """One row."""
    pairs = [pair for i in expected for pair in zip(tokens.get(i, []), expected[i], strict=False)]
    same, total = sum(a == b for a, b in pairs), sum(map(len, expected.values()))
    report.check(what, tokens == expected, f"{same} of {total} tokens are the same{note}", same=same, tokens=total)


def run(setting: Setting, report: Report) -> None:
    if reason := absent.lacking(*absent.EXTENSION_MODULES):
        for name in MODES:
            report.not_run(_what(name), f"{reason}: device cpu can't compute the reference")
        return
    log, checkpoint = Heard(), TinyCheckpoint()
    expected = gpu_only_tokens(cpu_decoder(TINY, checkpoint))
    decoder = gpu_decoder(TINY, checkpoint, torch.float32, setting.device)
    compare(report, _what("GPU-only"), gpu_only_tokens(decoder), expected)
    _check_sixteen_bits(setting, report, expected)
    others = [name for name in MODES if name != "GPU-only"]
    if reason := absent.lacking_host_tier():
        for name in others:
            report.not_run(_what(name), reason)
        if setting.on_cuda:
            _Checks(report, log, expected).check(tiny_executor(decoder, graphs=True), "GPU-only", _WITH_GRAPHS)
        return
    with cpu_attention(setting) as worker:
        checks = _Checks(report, log, expected, worker)
        executor = tiny_executor(decoder, worker.kv_bytes)
        for name in others:
            checks.check(executor, name)
        by_stream = checks.report_host(executor)
        if not setting.on_cuda:
            report.not_run(f"tokens, {_BY_THREAD}", NO_STREAM)
            report.not_run(f"tokens, {_WITH_GRAPHS}", NO_GRAPHS)
            return
        for name in others if by_stream else ():
            checks.check(executor, name, _BY_THREAD)
        executor.close_epoch()
        executor = tiny_executor(decoder, worker.kv_bytes, graphs=True)
        for name in MODES:
            checks.check(executor, name, _WITH_GRAPHS)
        executor.close()


_BY_THREAD, _WITH_GRAPHS = "doorbells and swaps by the executor's thread", "with graphs"


def _what(mode: str, how: str = "") -> str:
    return f"tokens, {mode}{', ' if how else ''}{how}, against device cpu"


class _Checks:
    """Of modes, an epoch each; what breaks one breaks no other."""

    def __init__(
        self, report: Report, log: Heard, expected: dict[int, list[int]], worker: Worker | None = None
    ) -> None:
        self._report = report
        self._log = log
        self._expected = expected
        self._worker = worker
        self._epochs = count(1)

    def check(self, executor: Executor, name: str, how: str = "") -> None:
        """One row."""
        what = _what(name, how)
        try:
            driver = self._open(executor, None if name == "GPU-only" else self._worker, by_thread=how == _BY_THREAD)
        except Exception as error:
            # What can't be captured is no wrong token: the service goes on without.
            self._broke(what, how != _WITH_GRAPHS, error)
            return
        with_graphs = how == _WITH_GRAPHS
        if with_graphs and not captured(executor):
            self._report.not_run(what, self._log.graphs_text())
            return
        try:
            MODES[name](driver)
            note = f"; {captured_text(executor)}" if with_graphs else ""
            compare(self._report, what, driver.tokens, self._expected, note)
        except Exception as error:
            self._broke(what, True, error)

    def report_host(self, executor: Executor) -> bool:
        """A row on what the device does by itself; whether it does anything."""
        try:
            self._open(executor, self._worker)
            host = executor._epoch.host if executor._epoch else None
            assert host is not None
            report_host(self._report, host, self._log)
            return host.only_pool.on_device is not None
        except Exception as error:
            self._broke("what was chosen", False, error)
            return False

    def _open(self, executor: Executor, worker: Worker | None, by_thread: bool = False) -> Driver:
        executor.close_epoch()  # The worker holds one region at a time.
        number = next(self._epochs)
        host = worker.attach(executor, number, LIMITS, by_thread=by_thread) if worker else None
        return Driver(executor, LIMITS, host, epoch=number)

    def _broke(self, what: str, is_check: bool, error: Exception) -> None:
        traceback.print_exc()
        self._report.broke(what, is_check, f"{type(error).__name__}: {error}")


def _check_sixteen_bits(setting: Setting, report: Report, expected: dict[int, list[int]]) -> None:
    """Log-probabilities of the reference's own answers, which have no near misses to stumble over."""
    texts = {i: (*PROMPTS[i], *expected[i]) for i in PROMPTS}
    checkpoint, dtype = TinyCheckpoint(), sixteen_bits(setting.device)
    right = _logprobs(cpu_decoder(TINY, checkpoint), texts)
    ours = _logprobs(gpu_decoder(TINY, checkpoint, dtype, setting.device), texts)
    errors = [abs(a - b) for a, b in zip(ours, right, strict=True)]
    mean = sum(errors) / len(errors)
    name = str(dtype).removeprefix("torch.")
    detail = f"mean error {mean:.3g} of {len(errors)}, at most {_LOGPROB_ERROR:g}; largest {max(errors):.3g}"
    report.check(f"log-probabilities of prompts in {name} against fp32", mean < _LOGPROB_ERROR, detail, mean=mean)


def _logprobs(decoder: Decoder, texts: dict[int, tuple[int, ...]]) -> list[float]:
    executor = tiny_executor(decoder)
    prefill = partial(Driver(executor, LIMITS).prefill, tier=Tier.GPU, room_tokens=1, chunk_tokens=_CHUNK_TOKENS)
    logprobs = [
        value
        for i, text in texts.items()
        for result in prefill(i, text, sampling=Sampling(num_prompt_logprobs=0))
        for _, part in result.prompt_logprobs
        for value in part.chosen
    ]
    executor.close()
    return logprobs
