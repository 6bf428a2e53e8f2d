"""The process: `python -m planner_svc --config FILE`, from its first line to its exit code."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from support import tiny_tokenizers
from support.fake_workers import FakeExecutor
from support.planner_rig import TOKENIZER, collect, first_delta, refused, request, streaming

from neoflex.v1 import inference_pb2 as pb
from neoflex.v1 import inference_pb2_grpc
from svc_common.model.read_spec import read_spec
from svc_common.model.store import ModelFiles

CONTEXT_TOKENS = 64


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path / "tiny-model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": TOKENIZER.vocab_size,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "eos_token_id": TOKENIZER.eos_token_ids[0],
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").touch()
    return directory


@pytest.fixture
async def executor() -> AsyncIterator[FakeExecutor]:
    fake = FakeExecutor(block_tokens=16, iteration_s=0.05)
    yield fake
    assert fake.problems == []
    await fake.kill()


async def spawn(config: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "planner_svc", "--config", str(config), stderr=asyncio.subprocess.PIPE
    )


async def line_with(process: asyncio.subprocess.Process, text: str) -> str:
    assert process.stderr is not None
    seen = []
    async for line in process.stderr:
        seen.append(line.decode())
        if text in seen[-1]:
            return seen[-1]
    raise AssertionError("".join(seen))


async def test_serves_and_drains_on_sigterm(model_dir: Path, tmp_path: Path, executor: FakeExecutor) -> None:
    executor.model_digest = read_spec(ModelFiles("tiny-model", model_dir)).digest
    config = tmp_path / "config.toml"
    config.write_text(
        f'[model]\nsource = "{model_dir}"\n[planner]\nlisten = "127.0.0.1:0"\n'
        f'[gpu]\nlisten = "{await executor.start()}"\n[cpu_attn]\nkv_bytes = 0\n'
    )
    process = await spawn(config)
    try:
        line = await line_with(process, "listening on")
        assert "model tiny-model, mode auto" in line
        address = line.partition("listening on ")[2].partition(",")[0]
        assert "64 GPU blocks, 0 host blocks of 16 tokens" in await line_with(process, "epoch")
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            info = await stub.GetModelInfo(pb.GetModelInfoRequest())
            assert (info.name, info.context_tokens) == ("tiny-model", CONTEXT_TOKENS)
            stream = stub.GenerateStream(streaming(request("the", max_tokens=20)))
            await first_delta(stream)
            process.send_signal(signal.SIGTERM)
            await line_with(process, "draining")
            assert (await refused(stub.Generate(request())))[1] == "DRAINING"
            *_, last = await collect(stream)
            assert last.finished.usage.completion_tokens == 20
        await line_with(process, "stopped")
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ("[planner]\nmax_sequence_tokens = 65\n", "planner.max_sequence_tokens must be at most 64"),
        ("[planner]\nmode = 'fast'\n", "planner.mode"),
        ("[planner]\nlisten = 'nobody'\n", "planner.listen"),
        ("[tls]\ncertificate = '/nowhere'\nkey = '/k'\n", "tls.certificate: /nowhere: No such file or directory"),
        ("chat_template = '/nowhere'\n", "model.chat_template: /nowhere: No such file or directory"),
        ("", "no-such-model"),
    ],
)
async def test_what_cannot_be_served_is_said_in_one_line(
    config: str, complaint: str, model_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "config.toml"
    source = model_dir if config else tmp_path / "no-such-model"
    path.write_text(f'[model]\nsource = "{source}"\n{config}')
    process = await spawn(path)
    _, errors = await process.communicate()
    assert process.returncode == 2
    [line] = errors.decode().splitlines()
    assert line.startswith("planner_svc: ")
    assert complaint in line
