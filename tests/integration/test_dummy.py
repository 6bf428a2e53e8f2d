"""A shape served without weights or tokenizer: what is made up is one model for all services, and for transformers."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from support.reference import Reference, Verdict

from neoflex import AsyncClient, Client, InvalidArgumentError
from svc_common.decoder.checkpoint import open_model
from svc_common.model.shapes import find_model

NUM_TOKENS = 12
PROMPTS = [[(7 * i * (number + 3) + number) % 1000 for i in range(5 + 9 * number)] for number in range(4)]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def reference_of(directory: Path) -> Reference:
    """transformers' model of that configuration, with the weights that are made up for it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    files = find_model(str(directory), "dummy")
    _, dummy = open_model(files)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            dummy.fill(name, parameter)
    return Reference(files, model)


def test_tokens_equal_transformers_with_the_same_weights(start, tmp_path, monkeypatch):
    """Two layers are the CPU's for all requests, whose process makes up the same; attention of others is, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "shape"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    stack = start(
        model={"source": str(directory), "load_format": "dummy"},
        planner={"decode_policy": "partition", "prefill_policy": "partition", "cpu_layers": 2, "max_batch_tokens": 64},
        gpu={"kv_bytes": "64KiB"},
        cpu_attn={"kv_bytes": "4MiB"},
    )
    with Client(stack.address) as client:
        with pytest.raises(InvalidArgumentError, match=r"request.text: the model has no tokenizer") as refused:
            client.generate("Name three planets.")
        assert refused.value.reason == "NO_TOKENIZER"
        with pytest.raises(InvalidArgumentError, match=r"request.stopping.stop.*no tokenizer"):
            client.generate(token_ids=[1], stop=["x"])
        assert client.generate(token_ids=[1, 2, 3], max_tokens=2, ignore_eos=True).text == ""

    async def answer_all() -> list[list[int]]:
        async with AsyncClient(stack.address) as client:
            answers = await asyncio.gather(
                *(
                    client.generate(token_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
                    for prompt in PROMPTS
                )
            )
        return [list(answer.token_ids) for answer in answers]

    reference, verdict = reference_of(directory), Verdict()
    for number, (prompt, tokens) in enumerate(zip(PROMPTS, asyncio.run(answer_all()), strict=True)):
        assert len(tokens) == NUM_TOKENS
        reference.judge(prompt, tokens, verdict, f"request {number}")
    assert verdict.mismatches == [], str(verdict)
    assert stack.server_info().counters.cpu_attention_ns > 0
