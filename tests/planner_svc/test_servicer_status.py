"""What a server says of itself: model, placement, counters, load, health, and that it drains."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2
from support.fake_workers import BLOCK_BYTES, HOST_BLOCK_BYTES, FakeExecutor, FakeHost
from support.planner_rig import (
    CONTEXT_TOKENS,
    TOKENIZER,
    Rig,
    StartRig,
    collect,
    first_delta,
    refused,
    request,
    streaming,
)

from neoflex.v1 import inference_pb2 as pb
from planner_svc.estimator.terms import Factors
from planner_svc.messages import calibration_message
from planner_svc.server import SERVICE_NAME
from svc_common.model.chat_template import Turn

FOREVER = 150
"""Tokens of an answer that a test ends by other means; with `slow` it would take seconds."""


def slow() -> FakeExecutor:
    return FakeExecutor(iteration_s=0.02)


# --- facts


async def test_tokenize_and_detokenize(start_rig: StartRig) -> None:
    rig = await start_rig()
    assert list((await rig.stub.Tokenize(pb.TokenizeRequest(text="the abc"))).token_ids) == TOKENIZER.encode("the abc")
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="the")])
    ids = list((await rig.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids)
    assert ids == TOKENIZER.encode_chat([Turn("user", "the")])
    assert (await rig.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "user:theassistant:"
    code, _, error = await refused(rig.stub.Detokenize(pb.DetokenizeRequest(token_ids=[-1])))
    assert (code, error.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"token_ids[0]: must be in [0, {TOKENIZER.vocab_size}), is -1",
    )


async def test_tokens_by_themselves(start_rig: StartRig) -> None:
    rig = await start_rig()
    [end] = TOKENIZER.eos_token_ids
    [half] = TOKENIZER.encode("é")[:1]
    response = await rig.stub.Detokenize(pb.DetokenizeRequest(token_ids=[64, half, end], with_tokens=True))
    assert list(response.tokens) == [
        pb.TokenText(text=b"a"),
        pb.TokenText(text="é".encode()[:1]),
        pb.TokenText(special="<end>"),
    ]
    assert list((await rig.stub.Detokenize(pb.DetokenizeRequest(token_ids=[64]))).tokens) == []


async def test_tools_that_the_template_does_not_know(start_rig: StartRig) -> None:
    rig = await start_rig()
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="the")], tools=[pb.Tool(name="add")])
    for call, field in (
        (rig.stub.Tokenize(pb.TokenizeRequest(chat=chat)), "chat.tools"),
        (rig.stub.Generate(pb.GenerateRequest(chat=chat)), "request.chat.tools"),
    ):
        code, reason, error = await refused(call)
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TOOLS_UNKNOWN")
        assert error.details() == f"{field}: the model's chat template knows no tools"
    model = await rig.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert model.tool_call_format == pb.TOOL_CALL_FORMAT_UNSPECIFIED


async def test_the_model_and_the_server_describe_themselves(start_rig: StartRig) -> None:
    rig = await start_rig(FakeExecutor(host_blocks=8), FakeHost())
    model = await rig.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.name, model.architecture, model.vocabulary_size) == ("tiny", "LlamaForCausalLM", TOKENIZER.vocab_size)
    assert (model.context_tokens, list(model.eos_token_ids)) == (CONTEXT_TOKENS, list(TOKENIZER.eos_token_ids))
    assert (model.compute_dtype, model.kv_dtype, model.host_kv_dtype) == ("fp32", "bf16", "int8")
    await rig.stub.Generate(request(max_tokens=3))
    info = await rig.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.version, info.device, info.block_tokens, info.block_bytes) == ("1.2.3", "cpu", 4, BLOCK_BYTES)
    assert info.host_block_bytes == HOST_BLOCK_BYTES
    assert (info.gpu_blocks, info.host_blocks, info.cpu_attention_threads) == (64, 8, 1)
    counters = info.counters
    assert (counters.accepted_requests, counters.finished_requests, counters.refused_requests) == (1, 1, 0)
    assert (counters.prefilled_tokens, counters.generated_tokens) == (1, 3)
    assert counters.gpu_only_iterations + counters.asymmetric_iterations >= 3
    assert counters.executor_busy_ns >= 3000
    assert counters.planning_ns > 0
    calibration = info.calibration
    # Nothing was attended on the CPU or moved between tiers.
    assert (calibration.cpu_decode, calibration.swap, calibration.contention) == (1, 1, 0)


def test_the_calibration_of_each_pool_is_told() -> None:
    message = calibration_message(Factors(cpu_decode=2.0, further_pools={1: 3.0}))
    assert (message.cpu_decode, dict(message.further_pools)) == (2.0, {1: 3.0})


async def test_threads_that_change_live_are_told(start_rig: StartRig) -> None:
    host = FakeHost()
    rig = await start_rig(FakeExecutor(host_blocks=8), host)

    async def threads_told() -> bool:
        info = await rig.stub.GetServerInfo(pb.GetServerInfoRequest())
        return bool(info.cpu_attention_threads == host.num_threads)

    host.num_threads = 3
    await rig.until(threads_told)
    assert len(rig.executor.epochs) == 1


async def test_load_follows_the_requests(start_rig: StartRig) -> None:
    rig = await start_rig(slow())
    stream = rig.stub.GenerateStream(streaming(request("x" * 10, max_tokens=FOREVER)))
    await first_delta(stream)
    load = await rig.load()
    assert (load.running_requests, load.waiting_requests) == (1, 0)
    assert (load.gpu_blocks_total, load.host_blocks_total) == (64, 0)
    assert load.gpu_blocks_used >= 3
    stream.cancel()
    await rig.until_free()


# --- health


async def test_watch_sees_a_stall_and_its_end(start_rig: StartRig) -> None:
    rig = await start_rig(watchdog_s=0.5)
    serving, not_serving = (
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
    )
    for name in ("", SERVICE_NAME, "readiness", "liveness"):
        assert await rig.is_serving(name)
    watch = rig.health.Watch(health_pb2.HealthCheckRequest(service="liveness"))
    assert (await watch.read()).status == serving
    rig.executor.gate.clear()
    call = asyncio.create_task(collect(rig.stub.GenerateStream(streaming(request()))))
    assert (await watch.read()).status == not_serving
    await rig.until(lambda: _is_not_serving(rig))
    rig.executor.gate.set()
    assert (await watch.read()).status == serving
    await call
    await rig.until_ready()
    watch.cancel()


async def _is_not_serving(rig: Rig) -> bool:
    return not await rig.is_serving()


async def test_draining_lets_the_running_end_and_refuses_the_new(start_rig: StartRig) -> None:
    rig = await start_rig(slow())
    stream = rig.stub.GenerateStream(streaming(request("the", max_tokens=40)))
    await first_delta(stream)
    stop = asyncio.create_task(rig.server.stop(30))
    await rig.until(lambda: _is_not_serving(rig))
    code, reason, _ = await refused(rig.stub.Generate(request()))
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    *_, last = await collect(stream)
    assert last.finished.finish.reason == pb.FINISH_REASON_LENGTH
    assert last.finished.usage.completion_tokens == 40
    await stop


async def test_draining_ends_what_outlasts_the_grace(start_rig: StartRig) -> None:
    rig = await start_rig(slow())
    stream = rig.stub.GenerateStream(streaming(request("the", max_tokens=FOREVER)))
    await first_delta(stream)
    stop = asyncio.create_task(rig.server.stop(0.1))
    code, reason, _ = await refused(collect(stream))
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    await stop
