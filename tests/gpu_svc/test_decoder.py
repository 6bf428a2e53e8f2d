"""Every architecture against transformers in fp32: logits of whole prompts, and greedy tokens through the executor."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gguf_files import GGUF_VARIANTS, write_gguf
from support.gpu import VARIANTS, Driver, dense_logits, load_decoder, load_torch_decoder, save_checkpoint
from support.reference import Reference, Verdict, load_transformers

from svc_common.cpu_kernels import runnable_linear_instruction_sets
from svc_common.decoder.checkpoint import CheckpointError, open_model
from svc_common.decoder.cpu_decoder import CpuDecoder
from svc_common.decoder.decoder import Decoder
from svc_common.decoder.load import load_weights
from svc_common.model.store import ModelFiles
from svc_common.plan import SubBatch

CPU = torch.device("cpu")
LOADERS: dict[str, Callable[..., Decoder]] = {"native": load_decoder, "torch": load_torch_decoder}
PROMPT = [(i * 37 + 11) % 257 for i in range(75)]


@pytest.fixture(params=LOADERS)
def load(request: pytest.FixtureRequest) -> Callable[..., Decoder]:
    """Files and, if not fp32, the weights' type -> a decoder."""
    return LOADERS[request.param]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(
    variant: str, load: Callable[..., Decoder], checkpoint: Callable[[str], ModelFiles]
) -> None:
    files = checkpoint(variant)
    with torch.inference_mode():
        expected = load_transformers(files)(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(dense_logits(load(files), PROMPT), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("instruction_set", runnable_linear_instruction_sets())
@pytest.mark.parametrize("variant", ["llama-tied", "llama-biases", "qwen3", "gemma3", "opt", "qwen2-moe"])
def test_every_instruction_set_gives_the_same_logits(
    variant: str, instruction_set: str, checkpoint: Callable[[str], ModelFiles]
) -> None:
    torch_decoder = load_torch_decoder(checkpoint(variant))
    spec, weights = torch_decoder.spec, torch_decoder.weights
    head = None if spec.tie_embeddings else weights.head
    decoder = CpuDecoder.packed(
        spec,
        torch.float32,
        weights.embedding,
        weights.layers,
        weights.final_norm,
        head,
        weights.positions,
        instruction_set,
    )
    expected = dense_logits(torch_decoder, PROMPT)
    torch.testing.assert_close(dense_logits(decoder, PROMPT), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_transformers(
    variant: str,
    load: Callable[..., Decoder],
    checkpoint: Callable[[str], ModelFiles],
    reference: Callable[[str], Reference],
    make_driver: Callable[..., Driver],
) -> None:
    """Odd chunk sizes, contexts of several lengths in one batch."""
    driver = make_driver(load(checkpoint(variant)))
    prompts = {1: PROMPT, 2: PROMPT[5:22], 3: PROMPT[:1], 4: PROMPT[::-1]}
    for sequence_id, prompt in prompts.items():
        driver.prefill(sequence_id, prompt, chunk_tokens=4 + 3 * sequence_id)
    for _ in range(20):
        driver.run(SubBatch(gpu_decodes=tuple(prompts)))
    verdict = Verdict()
    for sequence_id, prompt in prompts.items():
        assert len(driver.tokens[sequence_id]) == 21
        reference(variant).judge(prompt, driver.tokens[sequence_id], verdict, f"{variant} {sequence_id}")
    assert not verdict.mismatches, str(verdict)


def test_greedy_tokens_of_the_default_model(default_model: ModelFiles, make_driver: Callable[..., Driver]) -> None:
    driver = make_driver(load_decoder(default_model), num_gpu_blocks=40, block_tokens=16)
    prompts = {1: [504, 3575, 282, 4649, 314], 2: list(range(1000, 1150))}
    for sequence_id, prompt in prompts.items():
        driver.prefill(sequence_id, prompt, chunk_tokens=64)
    for _ in range(15):
        driver.run(SubBatch(gpu_decodes=(2, 1)))
    verdict, reference = Verdict(), Reference(default_model)
    for sequence_id, prompt in prompts.items():
        reference.judge(prompt, driver.tokens[sequence_id], verdict, str(sequence_id))
    assert verdict.steps == 32
    assert not verdict.mismatches, str(verdict)


def test_sixteen_bit_logits_stay_near_fp32(
    load: Callable[..., Decoder], checkpoint: Callable[[str], ModelFiles]
) -> None:
    expected = dense_logits(load(checkpoint("llama")), PROMPT)
    for dtype, tolerance in ((torch.float16, 0.02), (torch.bfloat16, 0.15)):
        decoder = load(checkpoint("llama"), dtype)
        assert decoder.weight_dtype == dtype
        actual = dense_logits(decoder, PROMPT)
        assert 0 < float((actual - expected).abs().mean() / expected.std()) < tolerance


def test_logits_of_a_token_do_not_depend_on_its_neighbours(default_model: ModelFiles) -> None:
    """Bit for bit, so that however requests are batched and prompts are cut, the same tokens come out."""
    decoder = load_decoder(default_model)
    torch.manual_seed(0)
    ids, positions = torch.randint(0, decoder.spec.vocab_size, (103,)), torch.arange(103) * 7
    attended = torch.randn(103, decoder.spec.num_q_heads, decoder.spec.head_dim)

    def run(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, workspace = decoder.embed(ids[rows], positions[rows]), decoder.workspace(positions[rows])
        for layer in (0, 1):
            decoder.pre_attention(layer, hidden, workspace)
            hidden = decoder.post_attention(layer, attended[rows], hidden)
        return workspace.qkv, decoder.logits(hidden).clone()

    all_qkv, all_logits = run(slice(0, 103))
    for start, end in ((0, 1), (1, 9), (9, 22), (22, 54), (54, 103), (102, 103)):
        qkv, logits = run(slice(start, end))
        assert torch.equal(qkv, all_qkv[start:end])
        assert torch.equal(logits, all_logits[start:end])


def test_sharded_checkpoint_loads_the_same_weights(checkpoint: Callable[[str], ModelFiles], tmp_path: Path) -> None:
    sharded = save_checkpoint("llama", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    one, many = load_torch_decoder(checkpoint("llama")).weights, load_torch_decoder(sharded).weights
    assert torch.equal(one.head, many.head)
    for ours, theirs in zip(one.layers, many.layers, strict=True):
        assert torch.equal(ours.qkv, theirs.qkv)
        assert torch.equal(ours.mlp.down, theirs.mlp.down)


def test_tied_head_is_held_once(checkpoint: Callable[[str], ModelFiles]) -> None:
    tied, untied = (load_torch_decoder(checkpoint(name)).weights for name in ("llama-tied", "llama"))
    assert tied.head is tied.embedding
    assert untied.head is not untied.embedding
    assert untied.num_bytes - tied.num_bytes == untied.head.nbytes
    # The same on the CPU, where 257 rows are padded to 288.
    tied_bytes, untied_bytes = (load_decoder(checkpoint(name)).weight_bytes for name in ("llama-tied", "llama"))
    assert untied_bytes - tied_bytes == 288 * 48 * 4


@pytest.mark.parametrize("variant", ["llama", "opt", "gemma2", "mixtral", "qwen2-moe", "qwen2-moe-dense"])
def test_the_spec_knows_the_weights_bytes(variant: str, checkpoint: Callable[[str], ModelFiles]) -> None:
    """All but norms and biases."""
    decoder = load_torch_decoder(checkpoint(variant), torch.bfloat16)
    tensors = load_file(checkpoint(variant).directory / "model.safetensors")
    vectors = sum(2 * tensor.numel() for tensor in tensors.values() if tensor.ndim == 1)
    assert decoder.spec.weight_bytes(2) == decoder.weight_bytes - vectors


def test_a_token_outside_the_vocabulary_is_refused(checkpoint: Callable[[str], ModelFiles]) -> None:
    for token in (-1, 257):
        with pytest.raises(IndexError, match="outside the vocabulary"):
            load_decoder(checkpoint("llama")).embed(torch.tensor([0, token]), torch.tensor([0, 1]))


def test_bad_checkpoints_are_refused_by_tensor(checkpoint: Callable[[str], ModelFiles], tmp_path: Path) -> None:
    good = checkpoint("llama")
    tensors = load_file(good.directory / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"

    def load() -> None:
        spec, weights = open_model(ModelFiles("bad", tmp_path))
        load_weights(weights, spec, torch.float32, CPU)

    shutil.copy(good.directory / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"holds no \*.safetensors"):
        load()
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        load()
    save_file(tensors | {name: tensors[name][:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[15, 48\], the model wants \[16, 48\]"):
        load()
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load()


@pytest.mark.parametrize("variant", GGUF_VARIANTS)
def test_gguf_gives_the_same_logits(variant: str, checkpoint: Callable[[str], ModelFiles], tmp_path: Path) -> None:
    """Names and keys are the gguf package's; the numbers are those of the safetensors."""
    files = checkpoint(variant)
    written = write_gguf(variant, files, load_transformers(files).config, tmp_path)
    from_gguf, from_hf = load_decoder(written), load_decoder(files)
    assert from_gguf.spec.num_parameters == from_hf.spec.num_parameters
    torch.testing.assert_close(dense_logits(from_gguf, PROMPT), dense_logits(from_hf, PROMPT), rtol=1e-4, atol=1e-4)
