"""ExecutorService over a real channel: epochs, plans in order, tables, errors; and the process as it is started."""

import asyncio
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.torch import load_file, save_file
from support.gpu import BLOCK_TOKENS, load_decoder, load_placed
from support.reference import Reference, Verdict
from support.stacks import until

from gpu_svc.executor import Executor
from gpu_svc.kv_cache import KvShape
from gpu_svc.servicer import ExecutorServicer
from gpu_svc.watch import ExecutorWatch
from neoflex.health import complaint
from neoflex.v1 import executor_pb2 as pb
from neoflex.v1 import executor_pb2_grpc
from svc_common.decoder.decoder import Decoder
from svc_common.grpc_server import GrpcServer
from svc_common.model.store import ModelFiles

PROMPT = list(range(30, 41))
GetFiles = Callable[[str], ModelFiles]
NOWHERE = "127.0.0.1:1"


@asynccontextmanager
async def serve(
    files: ModelFiles | Decoder, *cpu_attention_addresses: str, host_kv_dtype: torch.dtype | None = None
) -> AsyncIterator[executor_pb2_grpc.ExecutorServiceStub]:
    """A stub of a server in this process, with 40 GPU blocks."""
    async with serving(files, *cpu_attention_addresses, host_kv_dtype=host_kv_dtype) as (stub, _):
        yield stub


@asynccontextmanager
async def serving(
    files: ModelFiles | Decoder, *cpu_attention_addresses: str, host_kv_dtype: torch.dtype | None = None
) -> AsyncIterator[tuple[executor_pb2_grpc.ExecutorServiceStub, ExecutorServicer]]:
    """And its servicer."""
    decoder = load_decoder(files) if isinstance(files, ModelFiles) else files
    shape = KvShape.of(decoder.spec, BLOCK_TOKENS, decoder.dtype, host_kv_dtype)
    executor = Executor(decoder, shape, 40 * shape.block_bytes)
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as thread:
        server = GrpcServer("127.0.0.1:0", ["neoflex.v1.ExecutorService"])
        servicer = ExecutorServicer(executor, thread, cpu_attention_addresses)
        server.register(executor_pb2_grpc.add_ExecutorServiceServicer_to_server, servicer)
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield executor_pb2_grpc.ExecutorServiceStub(channel), servicer
        await server.stop(0)
        thread.submit(executor.close).result()


def open_epoch(epoch: int, **changes: Any) -> pb.OpenEpochRequest:
    limits = {"max_sequences": 8, "max_batch_tokens": 64, "max_sequence_tokens": 128}
    return pb.OpenEpochRequest(epoch=epoch, **(limits | changes))


def plan(epoch: int, iteration: int, *sub_batches: pb.SubBatch, **changes: Any) -> pb.ExecuteRequest:
    mode = pb.EXECUTION_MODE_ASYMMETRIC
    return pb.ExecuteRequest(
        plan=pb.IterationPlan(
            **({"epoch": epoch, "iteration": iteration, "mode": mode, "sub_batches": sub_batches} | changes)
        )
    )


def first_plan(epoch: int, tier: "pb.Tier", blocks: range = range(10)) -> pb.ExecuteRequest:
    new = pb.NewSequence(sequence_id=5, token_ids=PROMPT, tier=tier, blocks=blocks)
    new.sampling.CopyFrom(pb.SequenceSampling(top_p=1, repetition_penalty=1, num_logprobs=1))
    chunk = pb.PrefillChunk(sequence_id=5, start=0, num_tokens=len(PROMPT))
    return plan(epoch, 1, pb.SubBatch(prefills=[chunk]), new_sequences=[new])


async def execute(stub: Any, *requests: pb.ExecuteRequest) -> list[pb.IterationResult]:
    """All are sent before the first result is read."""

    async def send() -> AsyncIterator[pb.ExecuteRequest]:
        for request in requests:
            yield request

    return [response.result async for response in stub.Execute(send())]


async def test_a_policy_says_how_many_layers_stay(checkpoint: GetFiles, tmp_path: Path) -> None:
    """And the answer what that takes, of a device with room for five of seven layers."""
    roomy = load_placed(checkpoint("llama-deep"), tmp_path).memory
    layer, other = roomy.layer_bytes[0], roomy.other_bytes
    memory_bytes = other + 5 * layer
    decoder = load_placed(checkpoint("llama-deep"), tmp_path, memory_bytes=memory_bytes, link_bytes_per_s=10**9)
    async with serve(decoder) as stub:
        for epoch, request, resident in (
            (1, open_epoch(1, profile=True), 3),
            (2, open_epoch(2, policy=pb.ExecutionPolicy(resident_layers=1)), 1),
        ):
            opened = await stub.OpenEpoch(request)
            assert (opened.resident_layers, opened.streamed_layers) == (resident, 7 - resident)
            assert opened.streamed_bytes == (7 - resident) * layer
            expected = pb.DeviceMemory(
                memory_bytes=memory_bytes,
                weights_bytes=7 * layer,
                layer_bytes=layer,
                other_bytes=other,
                link_bytes_per_s=opened.memory.link_bytes_per_s,
            )
            assert opened.memory == expected
            assert opened.memory.link_bytes_per_s > 0
            if epoch == 1:
                assert opened.memory.link_bytes_per_s == opened.tables.link_bytes_per_s
            status = await stub.GetExecutorStatus(pb.GetExecutorStatusRequest())
            assert (status.resident_layers, status.weight_bytes) == (resident, other + resident * layer)
            assert (status.memory, status.streamed_bytes) == (expected, opened.streamed_bytes)
        for policy, code, text in (
            (
                pb.ExecutionPolicy(resident_layers=4),
                grpc.StatusCode.FAILED_PRECONDITION,
                "4 of 7 layers with embedding",
            ),
            (pb.ExecutionPolicy(resident_layers=8), grpc.StatusCode.INVALID_ARGUMENT, "must be in [0, 7], is 8"),
            (pb.ExecutionPolicy(decode_cpu_layers=1), grpc.StatusCode.INVALID_ARGUMENT, "must be 0"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=re.escape(text)) as refused:
                await stub.OpenEpoch(open_epoch(3, policy=policy))
            assert refused.value.code() is code
        assert (await stub.OpenEpoch(open_epoch(3))).resident_layers == 3


async def test_plans_run_in_order_and_tokens_are_the_reference(
    checkpoint: GetFiles, reference: Callable[[str], Reference]
) -> None:
    decode = pb.SubBatch(gpu_decode_sequence_ids=[5])
    async with serve(checkpoint("llama")) as stub:
        opened = await stub.OpenEpoch(open_epoch(3))
        assert (opened.device, opened.compute_dtype, opened.kv_dtype) == ("cpu", "fp32", "fp32")
        assert (opened.gpu_blocks, list(opened.host_pools)) == (40, [])
        assert opened.block_bytes == opened.host_block_bytes == 3 * 2 * 2 * BLOCK_TOKENS * 8 * 4
        assert opened.host_kv_dtype == "fp32"
        assert not opened.HasField("tables")
        results = await execute(stub, first_plan(3, pb.TIER_GPU), *(plan(3, i, decode) for i in range(2, 9)))
        status = await stub.GetExecutorStatus(pb.GetExecutorStatusRequest())
    assert [result.iteration for result in results] == list(range(1, 9))
    assert all(list(result.sequence_ids) == [5] for result in results)
    assert all(result.timings.total_ns > 0 for result in results)
    assert results[-1].gpu_attended_tokens == len(PROMPT) + 7
    tokens = [result.token_ids[0] for result in results]
    assert [result.logprobs[0].top_token_ids[0] for result in results] == tokens
    verdict = Verdict()
    reference("llama").judge(PROMPT, tokens, verdict)
    assert not verdict.mismatches
    assert (status.epoch, status.last_iteration, status.num_sequences, status.gpu_blocks_used) == (3, 8, 1, 10)
    assert status.pid == os.getpid()


async def test_host_tier_over_the_wire(
    checkpoint: GetFiles, reference: Callable[[str], Reference], cpu_attention: Any
) -> None:
    """Profiles through the real plane, then decodes on the CPU; epochs of one cpu_attn_svc count up."""
    cpu_attention.epoch += 1
    epoch = cpu_attention.epoch
    decode = pb.SubBatch(cpu_decode_sequence_ids=[5])
    async with serve(checkpoint("llama"), cpu_attention.address) as stub:
        opened = await stub.OpenEpoch(open_epoch(epoch, profile=True))
        num_blocks = 4 * 2**20 // opened.block_bytes
        assert list(opened.host_pools) == [pb.HostPool(num_blocks=num_blocks, num_threads=1)]
        check_tables(opened.tables)
        results = await execute(stub, first_plan(epoch, pb.TIER_HOST), *(plan(epoch, i, decode) for i in range(2, 6)))
        status = await stub.GetExecutorStatus(pb.GetExecutorStatusRequest())
        [traced] = await execute(stub, plan(epoch, 6, decode, trace=True))
        step = {"mode": pb.EXECUTION_MODE_DECOUPLED, "trace": True}
        parts = [pb.CohortStep(sequence_ids=[5], start_layer=start, num_layers=num) for start, num in ((0, 2), (2, 1))]
        part, ended = await execute(stub, *(plan(epoch, 7 + i, cohort=parts[i], **step) for i in (0, 1)))
    assert not any(result.HasField("trace") for result in results)
    assert (traced.trace.iteration, traced.trace.duration_ns) == (6, traced.timings.total_ns)
    [on_cpu] = traced.trace.cpu
    assert list(on_cpu.kinds) == 3 * [pb.TRACE_KIND_CPU_WAIT, pb.TRACE_KIND_CPU_ATTEND]
    assert list(on_cpu.layers) == [0, 0, 1, 1, 2, 2]
    assert (list(part.sequence_ids), part.cpu_attended_tokens) == ([], 0)
    assert (list(ended.sequence_ids), ended.cpu_attended_tokens) == ([5], len(PROMPT) + 6)
    assert part.trace.mode == pb.EXECUTION_MODE_DECOUPLED
    assert [list(result.trace.cpu[0].layers) for result in (part, ended)] == [[0, 0, 1, 1], [2, 2]]
    verdict = Verdict()
    tokens = [result.token_ids[0] for result in (*results, traced, ended)]
    reference("llama").judge(PROMPT, tokens, verdict)
    assert not verdict.mismatches
    assert results[-1].cpu_attended_tokens == len(PROMPT) + 4
    assert results[0].swapped_out_bytes == len(PROMPT) * opened.block_bytes // BLOCK_TOKENS
    assert (status.host_blocks_used, status.cpu_attention_attached) == (10, True)


async def test_a_host_tier_in_int8_over_the_wire(checkpoint: GetFiles, cpu_attention: Any) -> None:
    """Both tiers' types and sizes, tables measured over it, and bytes that move counted as the host's."""
    cpu_attention.epoch += 1
    epoch = cpu_attention.epoch
    decode = pb.SubBatch(cpu_decode_sequence_ids=[5])
    async with serve(checkpoint("llama"), cpu_attention.address, host_kv_dtype=torch.int8) as stub:
        opened = await stub.OpenEpoch(open_epoch(epoch, profile=True))
        assert (opened.kv_dtype, opened.host_kv_dtype) == ("fp32", "int8")
        heads = 3 * 2 * 2
        assert (opened.block_bytes, opened.host_block_bytes) == (
            heads * BLOCK_TOKENS * 8 * 4,
            heads * (BLOCK_TOKENS * 8 + 4),
        )
        [pool] = opened.host_pools
        assert (opened.gpu_blocks, pool.num_blocks) == (40, 4 * 2**20 // opened.host_block_bytes)
        check_tables(opened.tables)
        moved = pb.Swap(sequence_id=5, target=pb.TIER_HOST, blocks=range(10))
        plans = [plan(epoch, 2, decode, swaps=[moved]), plan(epoch, 3, decode)]
        first, second, _ = await execute(stub, first_plan(epoch, pb.TIER_GPU), *plans)
    assert first.swapped_out_bytes == 0
    assert second.swapped_out_bytes == -(-len(PROMPT) // BLOCK_TOKENS) * opened.host_block_bytes


def check_tables(tables: pb.OperationTables) -> None:
    """Grids cover the limits of `open_epoch` and what the tiers hold."""
    assert [point.num_tokens for point in tables.linear] == [1, 2, 4, 8, 16, 32, 64]
    assert [point.num_tokens for point in tables.head] == [1, 2, 4, 8]
    assert [(point.chunk_tokens, point.past_tokens) for point in tables.prefill] == [
        (1, 0),
        (1, 127),
        (4, 0),
        (4, 124),
        (16, 0),
        (16, 112),
        (64, 0),
        (64, 64),
    ]
    gpu = [(point.num_sequences, point.context_tokens) for point in tables.gpu_decode]
    assert gpu == [(1, 4), (1, 32), (1, 128), (4, 16), (4, 128), (4, 160), (8, 32), (8, 160)]
    cpu = [(point.num_sequences, point.context_tokens) for point in tables.cpu_decode]
    assert cpu == [(1, 4), (1, 32), (1, 128), (4, 16), (4, 128), (4, 512), (8, 32), (8, 256), (8, 1024)]
    for points in (tables.linear, tables.prefill, tables.gpu_decode, tables.cpu_decode, tables.head):
        assert all(point.seconds > 0 for point in points)
    assert tables.swap_bytes_per_s > 0
    assert tables.iteration_s > 0
    assert [point.num_tokens for point in tables.cpu_copy] == sorted(
        {point.num_sequences for point in tables.cpu_decode}
    )
    assert all(point.seconds > 0 for point in tables.cpu_copy)
    assert tables.cpu_signal_s >= 0


async def test_an_epoch_without_cpu_attention_says_why(checkpoint: GetFiles) -> None:
    async with serve(checkpoint("llama"), NOWHERE) as stub:
        opened = await stub.OpenEpoch(open_epoch(1, profile=True))
    assert list(opened.host_pools) == [pb.HostPool(error=f"nothing answers at {NOWHERE}")]
    assert len(opened.tables.cpu_decode) == 0
    assert opened.tables.swap_bytes_per_s == 0


async def test_the_services_that_answer_are_attached(checkpoint: GetFiles, cpu_attention: Any) -> None:
    async with serve(checkpoint("llama"), NOWHERE, cpu_attention.address) as stub:
        cpu_attention.epoch += 1
        opened = await stub.OpenEpoch(open_epoch(cpu_attention.epoch, profile=True))
    num_blocks = 4 * 2**20 // opened.host_block_bytes
    assert list(opened.host_pools) == [
        pb.HostPool(error=f"nothing answers at {NOWHERE}"),
        pb.HostPool(num_blocks=num_blocks, num_threads=1),
    ]
    assert list(opened.tables.cpu_pool_factors) == [1.0, 1.0]
    check_tables(opened.tables)


async def test_errors_of_plans_are_results(checkpoint: GetFiles) -> None:
    async with serve(checkpoint("llama")) as stub:
        before = await execute(stub, first_plan(1, pb.TIER_GPU))
        assert before[0].error == pb.EXECUTION_ERROR_STALE
        await stub.OpenEpoch(open_epoch(1))
        unset = await execute(stub, plan(1, 1, mode=pb.EXECUTION_MODE_UNSPECIFIED), plan(1, 2))
        assert [result.error for result in unset] == [pb.EXECUTION_ERROR_INVALID_PLAN, pb.EXECUTION_ERROR_STALE]
        assert unset[0].error_message == "mode 0 is none"
        await stub.OpenEpoch(open_epoch(2))
        tier = await execute(stub, first_plan(2, pb.TIER_UNSPECIFIED))
        assert (tier[0].error, tier[0].error_message) == (pb.EXECUTION_ERROR_INVALID_PLAN, "tier 0 is none")
        await stub.OpenEpoch(open_epoch(3))
        late = await execute(stub, first_plan(2, pb.TIER_GPU), first_plan(3, pb.TIER_GPU))
        assert [result.error for result in late] == [pb.EXECUTION_ERROR_STALE, pb.EXECUTION_ERROR_UNSPECIFIED]


async def test_bad_epochs_are_refused(checkpoint: GetFiles) -> None:
    async with serve(checkpoint("llama")) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.OpenEpoch(open_epoch(1, max_sequences=0, max_batch_tokens=-1))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (
            refused.value.details()
            == "max_sequences: must be at least 1, is 0; max_batch_tokens: must be at least 1, is -1"
        )
        await stub.OpenEpoch(open_epoch(5))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.OpenEpoch(open_epoch(5))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert refused.value.details() == "epoch 5 does not follow 5"


async def test_an_epoch_that_cannot_be_opened_says_why(checkpoint: GetFiles, tmp_path: Path) -> None:
    good = checkpoint("llama").directory
    tensors = load_file(good / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * math.nan}, tmp_path / "model.safetensors")
    shutil.copy(good / "config.json", tmp_path)
    async with serve(ModelFiles("nan", tmp_path)) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.OpenEpoch(open_epoch(1, profile=True))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        said = "NonFiniteLogitsError: the model computes NaN or infinity whatever it is given"
        assert refused.value.details() == said
        status = await stub.GetExecutorStatus(pb.GetExecutorStatusRequest())
        assert (status.num_sequences, status.gpu_kv_bytes) == (0, 0)


async def test_a_device_that_is_lost_ends_the_process(checkpoint: GetFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where it lives, and not for what a plan got wrong."""

    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    reasons: list[str] = []
    lost = False
    monkeypatch.setattr("gpu_svc.servicer.end_process", reasons.append)
    monkeypatch.setattr("gpu_svc.servicer.is_lost", lambda device: lost)
    async with serve(checkpoint("llama")) as stub:
        await stub.OpenEpoch(open_epoch(1))
        monkeypatch.setattr("gpu_svc.epoch.sample", fails)
        (result,) = await execute(stub, first_plan(1, pb.TIER_GPU))
        assert (result.error, reasons) == (pb.EXECUTION_ERROR_DEVICE, [])
        lost = True
        await stub.OpenEpoch(open_epoch(2))
        (result,) = await execute(stub, plan(2, 7))
        assert (result.error, reasons) == (pb.EXECUTION_ERROR_INVALID_PLAN, [])
        await stub.OpenEpoch(open_epoch(3))
        await execute(stub, first_plan(3, pb.TIER_GPU))
        assert reasons == ["RuntimeError: CUDA error: an illegal memory access was encountered"]
        monkeypatch.setattr("gpu_svc.executor.GpuKvCache", fails)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.OpenEpoch(open_epoch(4))
        assert len(reasons) == 2


async def test_a_broken_stream_leaves_the_service_ready_for_a_new_planner(checkpoint: GetFiles) -> None:
    async with serve(checkpoint("llama")) as stub:
        await stub.OpenEpoch(open_epoch(1))
        call = stub.Execute()
        await call.write(first_plan(1, pb.TIER_GPU))
        assert (await call.read()).result.iteration == 1
        call.cancel()
        await stub.OpenEpoch(open_epoch(2))
        (result,) = await execute(stub, first_plan(2, pb.TIER_GPU))
        assert result.error == pb.EXECUTION_ERROR_UNSPECIFIED
        assert len(result.token_ids) == 1


def write_config(path: Path, source: Path, **gpu: Any) -> Path:
    lines = [f'{key} = "{value}"' for key, value in gpu.items()]
    path.write_text(f'[model]\nsource = "{source}"\n[cpu_attn]\nkv_bytes = 0\n[gpu]\n' + "\n".join(lines) + "\n")
    return path


async def until_serving(watch: Any) -> AsyncIterator[health_pb2.HealthCheckResponse]:
    async for answer in watch:
        yield answer
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return


async def test_while_the_model_is_loaded_all_is_unavailable() -> None:
    with ThreadPoolExecutor(1) as thread:
        server, servicer = GrpcServer("127.0.0.1:0", []), ExecutorServicer(None, thread, ())
        server.register(executor_pb2_grpc.add_ExecutorServiceServicer_to_server, servicer)
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = executor_pb2_grpc.ExecutorServiceStub(channel)
            for call in (
                stub.OpenEpoch(open_epoch(1)),
                execute(stub, plan(1, 1)),
                stub.CompileGrammar(pb.CompileGrammarRequest(grammar="x")),
                stub.GetExecutorStatus(pb.GetExecutorStatusRequest()),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                assert refused.value.details() == "the model is being loaded"
        assert not servicer.is_ready
        assert servicer.report() == "the model is being loaded"
        await server.stop(0)


def test_streams_may_begin_while_the_watchdog_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as thread:
        servicer = ExecutorServicer(None, thread, ())
        runners: set[object] = set()

        class Runner:
            @property
            def running(self) -> None:
                runners.add(Runner())  # As the event loop's thread may at any moment.

        runners.add(Runner())
        monkeypatch.setattr(servicer, "_runners", runners)
        assert servicer.stall(1.0) is None
        assert servicer.running_s == 0


async def test_it_is_released_when_the_planner_lets_go(checkpoint: GetFiles) -> None:
    async with serving(checkpoint("llama")) as (stub, servicer):
        await servicer.released(0)  # Nobody holds it.
        await stub.OpenEpoch(open_epoch(1))
        call = stub.Execute()
        await call.write(first_plan(1, pb.TIER_GPU))
        assert (await call.read()).result.iteration == 1
        servicer.begin_stop()
        assert (await stub.GetExecutorStatus(pb.GetExecutorStatusRequest())).stopping
        assert not servicer.is_ready
        released = asyncio.create_task(servicer.released(600))
        # What the planner still wants is done.
        await call.write(plan(1, 2, pb.SubBatch(gpu_decode_sequence_ids=[5])))
        assert len((await call.read()).result.token_ids) == 1
        assert not released.done()
        await call.done_writing()
        await released


async def test_an_iteration_that_does_not_end_is_a_stall(checkpoint: GetFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, has_begun = threading.Event(), threading.Event()
    run = Executor.run

    def held_up(executor: Executor, *arguments: Any) -> Any:
        has_begun.set()
        may_end.wait(60)
        return run(executor, *arguments)

    monkeypatch.setattr(Executor, "run", held_up)
    async with serving(checkpoint("llama")) as (stub, servicer):
        await stub.OpenEpoch(open_epoch(1))
        server = GrpcServer("127.0.0.1:0", [])
        await server.start()
        watch = ExecutorWatch(server, servicer, 0.2)
        results = asyncio.create_task(execute(stub, first_plan(1, pb.TIER_GPU)))
        await asyncio.to_thread(has_begun.wait, 60)
        await asyncio.to_thread(until, lambda: watch.stall() is not None)
        assert re.fullmatch(r"iteration 1 runs for \d+\.\d s", watch.stall() or "")
        assert re.match(
            r"runs for \d+\.\d s: iteration 1, asymmetric; sub-batch 0: 1 prompts with \d+ tokens, 0 decodes",
            watch.report(),
        )
        await watch.publish_now()
        for name in ("liveness", "readiness"):
            assert "NOT_SERVING" in (await asyncio.to_thread(complaint, server.address, name, 20.0) or "")
        may_end.set()
        await results
        assert watch.stall() is None
        await watch.publish_now()
        for name in ("liveness", "readiness"):
            assert await asyncio.to_thread(complaint, server.address, name, 20.0) is None
        await server.stop(0)


async def test_the_process_starts_says_what_it_has_and_ends_on_sigterm(checkpoint: GetFiles, tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "c.toml",
        checkpoint("llama").directory,
        listen=f"unix:{tmp_path}/g",
        device="cpu",
        dtype="auto",
        kv_bytes="1MiB",
    )
    command = [sys.executable, "-m", "gpu_svc", "--config", str(config)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/g") as channel:
        request = health_pb2.HealthCheckRequest(service="neoflex.v1.ExecutorService")
        health = health_pb2_grpc.HealthStub(channel)
        seen = [answer.status async for answer in until_serving(health.Watch(request, wait_for_ready=True, timeout=60))]
        assert seen[-1] == health_pb2.HealthCheckResponse.SERVING
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        opened = await stub.OpenEpoch(open_epoch(1))
        assert opened.gpu_blocks == 2**20 // opened.block_bytes
        status = await stub.GetExecutorStatus(pb.GetExecutorStatusRequest())
        assert (status.pid, status.gpu_kv_bytes) == (process.pid, opened.gpu_blocks * opened.block_bytes)
    process.send_signal(signal.SIGTERM)
    _, log = await process.communicate()
    assert process.returncode == 0
    assert b"dtype auto: computing in" in log
    assert f"weights {status.weight_bytes} bytes; GPU KV {opened.gpu_blocks} blocks".encode() in log


async def test_the_process_does_not_wait_for_the_end_of_a_measurement(checkpoint: GetFiles, tmp_path: Path) -> None:
    """Of a large model that takes minutes, in which whoever stops the process loses patience."""
    path = checkpoint("llama").directory
    config = write_config(tmp_path / "c.toml", path, listen=f"unix:{tmp_path}/g", device="cpu", kv_bytes="1MiB")
    program = (
        "import time; from gpu_svc.executor import Executor; from gpu_svc.__main__ import main\n"
        "Executor.profile = lambda self: print('measuring', flush=True) or time.sleep(600)\n"
        "main()"
    )
    command = [sys.executable, "-c", program, "--config", str(config)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/g") as channel:
        request = health_pb2.HealthCheckRequest(service="neoflex.v1.ExecutorService")
        health = health_pb2_grpc.HealthStub(channel)
        async for _ in until_serving(health.Watch(request, wait_for_ready=True, timeout=60)):
            pass
        message = open_epoch(1, profile=True)
        opening = asyncio.create_task(executor_pb2_grpc.ExecutorServiceStub(channel).OpenEpoch(message).code())
        assert process.stdout is not None
        assert await process.stdout.readline() == b"measuring\n"
        process.send_signal(signal.SIGTERM)
        _, log = await process.communicate()
        await opening
    assert process.returncode == 0
    assert b"stopped in the middle of" in log
    assert b"Traceback" not in log


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("no-such-model", {"device": "cpu"}, "no-such-model"),
        ("llama", {"device": "cuda"}, 'gpu.device is "cuda", but torch finds no CUDA device'),
    ],
)
def test_the_process_says_why_it_cannot_start(
    source: str, options: dict[str, str], message: str, checkpoint: GetFiles, tmp_path: Path
) -> None:
    if options["device"] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    path = checkpoint("llama").directory if source == "llama" else tmp_path / source
    config = write_config(tmp_path / "c.toml", path, listen=f"unix:{tmp_path}/g", **options)
    ended = subprocess.run(
        [sys.executable, "-m", "gpu_svc", "--config", str(config)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_policies_that_cannot_be(checkpoint: GetFiles, cpu_attention: Any) -> None:
    """What contradicts itself is refused; layers that the CPU attention service can't compute are left out."""
    decoder = load_decoder(checkpoint("llama"))
    async with serve(decoder, cpu_attention.address) as stub:
        for policy, text in (
            (
                pb.ExecutionPolicy(resident_layers=2, prefill_cpu_layers=2, decode_cpu_layers=1),
                "at most decode_cpu_layers",
            ),
            (pb.ExecutionPolicy(resident_layers=3, decode_cpu_layers=4), r"must be in \[0, 3\], is 4"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=text) as caught:
                await stub.OpenEpoch(open_epoch(1, policy=policy))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        cpu_attention.epoch += 1
        policy = pb.ExecutionPolicy(resident_layers=3, decode_cpu_layers=1)
        opened = await stub.OpenEpoch(open_epoch(cpu_attention.epoch, policy=policy, profile=True))
    [pool] = opened.host_pools
    assert "is another model than the executor's" in pool.error
    assert opened.policy == pb.ExecutionPolicy(resident_layers=3)
    assert (pool.num_blocks, opened.gpu_blocks) == (0, 40)
    assert opened.tables.linear
    assert not opened.tables.cpu_linear


async def test_cpu_layers_need_one_cpu_attention_service(checkpoint: GetFiles) -> None:
    policy = pb.ExecutionPolicy(resident_layers=3, decode_cpu_layers=2)
    for addresses, where in (
        ((NOWHERE, NOWHERE), "with several CPU attention services"),
        ((), "where cpu_attn.kv_bytes is 0"),
    ):
        async with serve(checkpoint("llama"), *addresses) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.OpenEpoch(open_epoch(1, policy=policy))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == f"policy.decode_cpu_layers: must be 0 {where}, is 2"
