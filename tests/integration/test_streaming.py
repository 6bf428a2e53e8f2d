"""A model that does not fit on its device is served all the same, and yields transformers' greedy tokens."""

import asyncio

import pytest
import torch
from support.executor import executor_status
from support.reference import Verdict

from gpu_svc.activations import Activations
from gpu_svc.limits import Limits
from neoflex import AsyncClient
from svc_common.model.read_spec import read_spec

NUM_TOKENS = 24
KV_BYTES = 24 * 2**20
LAYER_BYTES = 14_160_384
"""Of the default model in fp32; embedding and head take as much as eight."""


def test_tokens_equal_transformers(start, files, reference, prompts, tmp_path, monkeypatch):
    """Ten layers lie on the device, twenty are streamed through two buffers, KV moves between the tiers beside them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    limits = {"max_running_sequences": 16, "max_batch_tokens": 512, "max_sequence_tokens": 2048}
    activations = Activations(read_spec(files), torch.device("cpu"), torch.float32, torch.float32)
    memory_bytes = KV_BYTES + 20 * LAYER_BYTES + activations.num_bytes(Limits(*limits.values()))
    stack = start(
        model={"source": str(files.gguf)},
        planner={"prefill_policy": "offload", "decode_policy": "offload", **limits},  # Whatever else would be faster.
        gpu={"kv_bytes": KV_BYTES, "memory_bytes": memory_bytes, "link_bytes_per_s": "4GB"},
        cpu_attn={"kv_bytes": "96MiB"},
    )
    status = executor_status(stack)
    assert status.memory.layer_bytes == LAYER_BYTES
    assert (status.resident_layers, status.streamed_bytes) == (10, 20 * LAYER_BYTES)
    assert status.weight_bytes + 2 * LAYER_BYTES + status.gpu_kv_bytes + status.memory.activation_bytes <= memory_bytes
    assert 0 < status.memory.link_bytes_per_s < 4.1e9
    (file,) = (tmp_path / "neoflex" / "layers").iterdir()
    assert file.stat().st_size == pytest.approx(30 * LAYER_BYTES + status.memory.other_bytes, rel=0.001)

    async def answer_all() -> list[list[int]]:
        async with AsyncClient(stack.address) as client:
            answers = await asyncio.gather(
                *(
                    client.generate(token_ids=p, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout=300)
                    for p in prompts[:-1]
                )
            )
        return [list(answer.token_ids) for answer in answers]

    verdict = Verdict()
    for number, (prompt, tokens) in enumerate(zip(prompts, asyncio.run(answer_all()), strict=False)):
        assert len(tokens) == NUM_TOKENS
        reference.judge(prompt, tokens, verdict, f"request {number}")
    print(f"\n{verdict}")
    assert verdict.mismatches == []
