"""Captured iterations: the same tokens and the same KV as eager ones, whoever shares a batch; replays repeat calls."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.gpu import CPU, Driver, load_decoder, load_torch_decoder, open_model
from support.lengths_on_device import make_backend
from support.paged_attention import HEAD_DIM, fill, plain
from support.paged_attention import spec as plain_spec
from support.reference import Reference, Verdict
from support.repeat_capture import GRAPH_BYTES, RepeatCapture, graph_options
from support.streams import ImmediateOperations, Sides

from gpu_svc.attention.triton_backend import TritonAttention
from gpu_svc.graph_keys import GraphKey
from gpu_svc.graph_options import why_eager
from gpu_svc.graphs import Graphs
from gpu_svc.kv_cache import KvShape
from gpu_svc.limits import Limits
from gpu_svc.triton_ops import TritonOps
from svc_common.decoder.load import load_weights
from svc_common.decoder.torch_decoder import TorchDecoder
from svc_common.model.spec import ModelSpec
from svc_common.model.store import ModelFiles
from svc_common.plan import SubBatch, Tier
from svc_common.policy import ExecutionPolicy
from svc_common.trace import TraceKind

MakeDriver = Callable[..., Driver]
GetFiles = Callable[[str], ModelFiles]
GetReference = Callable[[str], Reference]

LIMITS = Limits(max_sequences=6, max_batch_tokens=64, max_sequence_tokens=64)
PROMPTS = {i: [(i * 53 + j * 31 + j * j) % 257 for j in range(3 + 4 * i)] for i in range(1, 7)}
ON_GPU = [GraphKey(rows, (0,)) for rows in (6, 4, 2, 1)]


@pytest.fixture
def lengths_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_svc.epoch.make_backend", make_backend)


def graphs_of(driver: Driver) -> Graphs:
    epoch = driver.executor._epoch
    assert epoch is not None
    assert epoch._graphs is not None
    return epoch._graphs


def cache_of(driver: Driver) -> torch.Tensor:
    """Without the scratch block."""
    epoch = driver.executor._epoch
    assert epoch is not None
    return epoch.cache.blocks[:, : epoch.cache.num_blocks]


def assert_tokens(reference: Reference, driver: Driver) -> None:
    verdict = Verdict()
    for sequence_id, tokens in driver.tokens.items():
        reference.judge(PROMPTS[sequence_id], tokens, verdict, str(sequence_id))
    assert not verdict.mismatches, str(verdict)


def run_on_gpu(driver: Driver) -> None:
    """Sequences come and go, so that replays are padded by 0, 1 and more."""
    for sequence_id in (1, 2, 3):
        driver.prefill(sequence_id, PROMPTS[sequence_id], room_tokens=12)
    for ids in ((1, 2, 3), (3, 1), (2,), (3, 2, 1)):
        driver.run(SubBatch(gpu_decodes=ids))
    driver.run(released=(2,))
    for sequence_id in (4, 5, 6):
        driver.prefill(sequence_id, PROMPTS[sequence_id], room_tokens=12)
    for ids in ((1, 3, 4, 5, 6), (6, 5, 4, 3), (1, 6, 3)):
        driver.run(SubBatch(gpu_decodes=ids), SubBatch())


@pytest.mark.usefixtures("lengths_on_device")
@pytest.mark.parametrize("variant", ["llama", "gemma2", "opt"])
def test_replays_yield_the_reference_tokens(
    variant: str, checkpoint: GetFiles, reference: GetReference, make_driver: MakeDriver
) -> None:
    """Rotary embedding, a sliding window with a soft cap, learned positions."""
    capture = RepeatCapture()
    driver = make_driver(load_torch_decoder(checkpoint(variant)), 60, limits=LIMITS, graphs=graph_options(capture))
    assert graphs_of(driver).keys == ON_GPU
    before = capture.num_replays
    run_on_gpu(driver)
    assert capture.num_replays == before + 7
    assert_tokens(reference(variant), driver)


def test_tritons_kernels_are_captured(
    checkpoint: GetFiles, reference: GetReference, make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, in the interpreter; a decode is padded to two."""

    def make_triton(model: ModelSpec, shape: KvShape, dtype: torch.dtype, device: torch.device) -> TritonAttention:
        return TritonAttention(model, shape.block_tokens, dtype, device)

    monkeypatch.setattr("gpu_svc.epoch.make_backend", make_triton)
    monkeypatch.setattr("gpu_svc.graphs.decode_keys", lambda most: [GraphKey(2, (0,))])
    monkeypatch.setattr(Graphs, "_launch_text", lambda graphs: "")  # The interpreter takes its time.
    spec, opened = open_model(checkpoint("gemma2"))
    decoder = TorchDecoder(spec, load_weights(opened, spec, torch.float32, CPU), TritonOps())
    capture = RepeatCapture()
    driver = make_driver(decoder, 20, limits=Limits(2, 32, 32), graphs=graph_options(capture))
    driver.prefill(3, PROMPTS[3], room_tokens=4)
    before = capture.num_replays
    driver.run(SubBatch(gpu_decodes=(3,)))
    assert capture.num_replays == before + 1
    assert_tokens(reference("gemma2"), driver)


@pytest.mark.usefixtures("lengths_on_device")
def test_padding_leaves_no_trace(checkpoint: GetFiles, make_driver: MakeDriver) -> None:
    decoder = load_torch_decoder(checkpoint("llama"))
    eager = make_driver(decoder, 60, limits=LIMITS)
    replayed = make_driver(decoder, 60, limits=LIMITS, graphs=graph_options(RepeatCapture()))
    assert not cache_of(replayed).any()  # Captures write to the scratch block alone.
    run_on_gpu(eager)
    run_on_gpu(replayed)
    ours, theirs = cache_of(replayed), cache_of(eager)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    # Matrices of other heights may be added up in another order; what nobody wrote is as it was, to the bit.
    assert torch.equal(ours == 0, theirs == 0)


@pytest.mark.usefixtures("lengths_on_device")
def test_without_padding_nothing_differs(checkpoint: GetFiles, make_driver: MakeDriver) -> None:
    decoder, caches = load_torch_decoder(checkpoint("llama")), []
    for graphs in (None, graph_options(RepeatCapture())):
        driver = make_driver(decoder, 60, limits=LIMITS, graphs=graphs)
        for sequence_id in (1, 2):
            driver.prefill(sequence_id, PROMPTS[sequence_id], room_tokens=12)
        for _ in range(3):
            driver.run(SubBatch(gpu_decodes=(2, 1)))
        caches.append(cache_of(driver).clone())
    assert torch.equal(*caches)


class BakedWords(RepeatCapture):
    """As a GPU captures: words keep the values of the capture, and nothing is rung while it lasts."""

    def __init__(self, sides: Sides) -> None:
        super().__init__()
        self._sides = sides

    def capture(self, run: Callable[[], None]) -> Any:
        operations: Any = self._sides.operations[-1]
        baked: list[tuple[int, int]] = []
        operations.send = lambda slot, copies, word, value: baked.append((slot, value))
        operations.fetch = lambda slot, word, value, target, source: baked.append((slot, value))
        run()
        del operations.send, operations.fetch

        def replay() -> None:
            left = iter(baked)

            def send(slot: int, copies: Any, word: int, value: int) -> None:
                ImmediateOperations.send(operations, slot, copies, word, next(left)[1])

            def fetch(slot: int, word: int, value: int, target: torch.Tensor, source: torch.Tensor) -> None:
                ImmediateOperations.fetch(operations, slot, word, next(left)[1], target, source)

            operations.send, operations.fetch = send, fetch
            try:
                run()
            finally:
                del operations.send, operations.fetch

        return super().capture(replay)


@pytest.mark.usefixtures("lengths_on_device")
@pytest.mark.parametrize("stream_doorbells", [False, True])
def test_two_sub_batches_beside_the_cpu(
    checkpoint: GetFiles,
    reference: GetReference,
    make_driver: MakeDriver,
    cpu_attention: Any,
    stream_doorbells: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asymmetric, same-layer and GPU-only iterations by turns; the real worker attends, told of real rows alone."""
    sides = Sides()
    if stream_doorbells:
        monkeypatch.setattr("gpu_svc.cpu_attention_client._device_side", sides.make)
    capture = BakedWords(sides) if stream_doorbells else RepeatCapture()
    decoder = load_torch_decoder(checkpoint("llama"))
    driver = make_driver(decoder, 40, cpu_attention, limits=LIMITS, graphs=graph_options(capture))
    assert GraphKey(4, (4, 4)) in graphs_of(driver).keys
    tiers = {1: Tier.GPU, 2: Tier.HOST, 3: Tier.HOST, 4: Tier.GPU, 5: Tier.HOST}
    for sequence_id, tier in tiers.items():
        driver.prefill(sequence_id, PROMPTS[sequence_id], tier, room_tokens=12)
    before = capture.num_replays
    for sub_batches in (
        (SubBatch(gpu_decodes=(1, 4), cpu_decodes=(3,)), SubBatch(cpu_decodes=(2, 5))),
        (SubBatch(gpu_decodes=(4,)), SubBatch(cpu_decodes=(5, 2, 3))),
        (SubBatch(cpu_decodes=(5,)), SubBatch(cpu_decodes=(3,))),
        (SubBatch(gpu_decodes=(1,), cpu_decodes=(2, 3, 5)), SubBatch()),
        (SubBatch(cpu_decodes=(2,)),),
        (SubBatch(gpu_decodes=(1, 4)),),
    ):
        result = driver.run(*sub_batches)
        ids = [one for batch in sub_batches for one in (*batch.gpu_decodes, *batch.cpu_decodes)]
        assert [sequence_id for sequence_id, _ in result.tokens] == ids
    assert capture.num_replays == before + 6
    attended = driver.results[-3]
    assert attended.cpu_attended_tokens == sum(len(PROMPTS[i]) for i in (2, 3, 5)) + 3 + 4 + 4
    assert attended.timings.cpu_attention_ns > 0
    driver.run(SubBatch(), SubBatch(cpu_decodes=(2, 5)))  # Of this form nothing is captured.
    assert capture.num_replays == before + 6
    assert_tokens(reference("llama"), driver)


def test_all_kv_on_the_host_needs_no_attention_on_the_device(
    checkpoint: GetFiles, reference: GetReference, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    capture = RepeatCapture()
    driver = make_driver(
        load_decoder(checkpoint("gemma2")), 0, cpu_attention, limits=LIMITS, graphs=graph_options(capture)
    )
    for sequence_id in (1, 2, 3, 4, 5):
        driver.prefill(sequence_id, PROMPTS[sequence_id], Tier.HOST, room_tokens=12)
    before = capture.num_replays
    for _ in range(3):
        driver.run(SubBatch(cpu_decodes=(1, 3)), SubBatch(cpu_decodes=(2, 5, 4)))
    assert capture.num_replays == before + 3
    assert_tokens(reference("gemma2"), driver)


@pytest.mark.usefixtures("lengths_on_device")
def test_a_budget_holds_the_largest(checkpoint: GetFiles, reference: GetReference, make_driver: MakeDriver) -> None:
    """Two of four graphs fit: 3 decodes take that of 4, 1 would be padded too much for 6 and takes that of 4."""
    capture = RepeatCapture()
    decoder = load_torch_decoder(checkpoint("llama"))
    driver = make_driver(decoder, 60, limits=LIMITS, graphs=graph_options(capture, 3 * GRAPH_BYTES))
    assert graphs_of(driver).keys == ON_GPU[:2]
    before = capture.num_replays
    run_on_gpu(driver)
    assert capture.num_replays == before + 7
    assert_tokens(reference("llama"), driver)
    nothing = make_driver(decoder, 60, limits=LIMITS, graphs=graph_options(capture, GRAPH_BYTES))
    assert graphs_of(nothing).keys == []


@pytest.mark.usefixtures("lengths_on_device")
def test_a_capture_that_fails_leaves_its_size_eager(
    checkpoint: GetFiles, reference: GetReference, make_driver: MakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    failing = iter((False, True, False, True))
    capture = RepeatCapture(lambda: next(failing))
    decoder = load_torch_decoder(checkpoint("llama"))
    driver = make_driver(decoder, 60, limits=LIMITS, graphs=graph_options(capture))
    assert graphs_of(driver).keys == [ON_GPU[0], ON_GPU[2]]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.partition(" stays eager: ")[2] for text in warnings] == [
        "RuntimeError: operation not permitted when stream is capturing"
    ] * 2
    run_on_gpu(driver)
    assert_tokens(reference("llama"), driver)
    caplog.clear()
    never = make_driver(decoder, 60, limits=LIMITS, graphs=graph_options(RepeatCapture(lambda: True)))
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 3
    assert graphs_of(never).keys == []


@pytest.mark.usefixtures("lengths_on_device")
def test_a_replay_that_computes_something_else_is_not_used(
    checkpoint: GetFiles, make_driver: MakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    class Forgetful(RepeatCapture):
        def capture(self, run: Callable[[], None]) -> Any:
            return super().capture(lambda: None)

    driver = make_driver(load_torch_decoder(checkpoint("llama")), 60, limits=LIMITS, graphs=graph_options(Forgetful()))
    assert graphs_of(driver).keys == []
    assert "its replay computes other logits" in caplog.text


@pytest.mark.usefixtures("lengths_on_device")
def test_the_cpu_that_is_left_without_an_end_is_left_out_from_then_on(
    checkpoint: GetFiles, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    """As by a replay that does not ring: the epoch fails to open, the next one goes without."""

    class Silent(RepeatCapture):
        def capture(self, run: Any) -> Any:
            (key,) = run.args
            return super().capture(_stand_still if key.has_cpu_work else run)

    options = graph_options(Silent())
    decoder = load_torch_decoder(checkpoint("llama"))
    with pytest.raises(RuntimeError, match="a replay stands still"):
        make_driver(decoder, 40, cpu_attention, limits=LIMITS, graphs=options)
    assert not options.with_cpu_work
    driver = make_driver(decoder, 40, cpu_attention, limits=LIMITS, graphs=options)
    assert graphs_of(driver).keys == ON_GPU
    driver.prefill(2, PROMPTS[2], Tier.HOST)
    driver.run(SubBatch(cpu_decodes=(2,)))


def _stand_still() -> None:
    raise RuntimeError("a replay stands still")


@pytest.mark.usefixtures("lengths_on_device")
def test_a_trace_shows_a_replay_as_one_step(checkpoint: GetFiles, make_driver: MakeDriver) -> None:
    decoder = load_torch_decoder(checkpoint("llama"))
    driver = make_driver(decoder, 60, limits=Limits(2, 64, 64), graphs=graph_options(RepeatCapture()))
    driver.prefill(1, PROMPTS[1])
    trace = driver.run(SubBatch(gpu_decodes=(1,)), trace=True).trace
    assert trace is not None
    steps = [(event.kind, event.layer) for event in trace.events(trace.gpu)]
    assert (TraceKind.REPLAY, -1) in steps
    assert all(layer == -1 for _, layer in steps)
    assert [(batch.gpu_decodes, batch.cpu_decodes) for batch in trace.sub_batches] == [(1, 0)]


@pytest.mark.usefixtures("lengths_on_device")
def test_tables_are_measured_on_replays(checkpoint: GetFiles, make_driver: MakeDriver) -> None:
    capture = RepeatCapture()
    decoder = load_torch_decoder(checkpoint("llama"))
    driver = make_driver(decoder, 8, limits=Limits(2, 4, 8), graphs=graph_options(capture))
    before = capture.num_replays
    tables = driver.executor.profile()
    # Linear operations of 1 and 2 tokens, attention of 1 and 2 decodes; each at least 2 times, measured twice.
    assert capture.num_replays >= before + 16
    assert [num for num, _ in tables.linear] == [1, 2, 4]
    assert {num for num, _, _ in tables.gpu_decode} == {1, 2}
    assert all(seconds > 0 for _, seconds in tables.linear)


def test_attention_that_needs_lengths_on_the_host_is_not_captured(
    checkpoint: GetFiles, make_driver: MakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    graphs = graph_options(RepeatCapture())
    driver = make_driver(load_torch_decoder(checkpoint("llama")), 60, limits=LIMITS, graphs=graphs)
    assert graphs_of(driver).keys == []
    assert "none can be captured with this attention" in caplog.text
    moe = make_driver(load_decoder(checkpoint("mixtral")), 60, limits=LIMITS, graphs=graphs)
    assert moe.executor._epoch is not None
    assert moe.executor._epoch._graphs is None
    assert "the host chooses experts" in caplog.text


@pytest.mark.parametrize("longest", [600, 5000])
def test_attention_is_launched_alike_whatever_the_lengths(longest: int) -> None:
    """Into as many parts as the longest context allowed, of which a short one's are empty."""
    torch.manual_seed(0)
    lengths = [600, 1, 300]
    blocks, tables, sequences = fill(lengths, 1, 16, "fp32")
    q, context = torch.randn(3, 2, HEAD_DIM), torch.zeros(3, dtype=torch.int32)
    attention = TritonAttention(plain_spec(2, 1, 64, 0.0), 16, torch.float32, CPU)
    work = attention.decode_on_device(context, torch.from_numpy(tables), longest)
    context.copy_(torch.tensor(lengths))  # What it reads is what is there by then.
    for layer, window in enumerate((64, None)):
        out = torch.full(q.shape, float("nan"))
        work.run(layer, q, blocks, out)
        for i, (k, v) in enumerate(sequences):
            expected = plain(q[i : i + 1], k, v, torch.tensor([lengths[i] - 1]), window, 0.0)
            torch.testing.assert_close(out[i : i + 1].double(), expected, rtol=1e-4, atol=1e-5)


def test_what_is_not_all_on_the_device_is_eager(checkpoint: GetFiles) -> None:
    decoder = load_decoder(checkpoint("llama"))  # 3 layers
    assert why_eager(decoder, ExecutionPolicy(3)) is None
    assert why_eager(decoder, ExecutionPolicy(2)) == "weights are streamed"
    assert why_eager(decoder, ExecutionPolicy(2, 1, 1)) == "the CPU computes layers"
