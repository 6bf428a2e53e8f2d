"""Made-up weights: the same wherever and in whatever order they are made, and of a size that every layer keeps."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.gpu import VARIANTS, dense_logits, load_decoder, load_placed, load_torch_decoder

from svc_common.decoder.checkpoint import open_model
from svc_common.decoder.dtypes import DTYPES
from svc_common.decoder.dummy import DummyCheckpoint
from svc_common.decoder.layer_writer import open_layer_file
from svc_common.decoder.load import load_weights
from svc_common.decoder.weights import tensors
from svc_common.model.shapes import find_model
from svc_common.model.store import ModelFiles

PROMPT = [(i * 37 + 11) % 257 for i in range(40)]
GetFiles = Callable[[str], ModelFiles]


def shape_of(files: ModelFiles, directory: Path, **changes: object) -> ModelFiles:
    """As a model of which nothing but the configuration is there."""
    config = json.loads((files.directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return find_model(str(directory), "dummy")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_has_all_its_weights_without_a_file(variant: str, checkpoint: GetFiles, tmp_path: Path) -> None:
    files = shape_of(checkpoint(variant), tmp_path)
    assert files == ModelFiles(tmp_path.name, tmp_path, is_dummy=True)
    logits = dense_logits(load_torch_decoder(files), PROMPT)
    assert logits.isfinite().all()
    assert 0.05 < logits.std() < 5
    assert torch.allclose(dense_logits(load_decoder(files), PROMPT), logits, atol=1e-3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
def test_a_layer_file_holds_the_same_weights(dtype: str, checkpoint: GetFiles, tmp_path: Path) -> None:
    """As what is resident without a file, so that where a layer runs changes no token."""
    (tmp_path / "model").mkdir()
    files = shape_of(checkpoint("qwen2-moe"), tmp_path / "model")
    own = load_decoder(files, DTYPES[dtype])
    file = open_layer_file(files, *open_model(files), DTYPES[dtype], tmp_path)
    mapped = file.decoder(range(own.spec.num_layers), vocabulary=True)
    assert torch.equal(dense_logits(mapped, PROMPT), dense_logits(own, PROMPT))
    assert open_layer_file(files, *open_model(files), DTYPES[dtype], tmp_path).path == file.path


def test_on_a_gpu_streamed_layers_are_those_that_are_made_there(checkpoint: GetFiles, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    files = shape_of(checkpoint("llama-deep"), tmp_path / "model")
    made = load_torch_decoder(files, torch.bfloat16)
    placed = load_placed(files, tmp_path, torch.bfloat16, torch_layers=True)
    placed.place(range(0), placed.spec.num_layers)
    assert torch.equal(dense_logits(placed, PROMPT), dense_logits(made, PROMPT))
    placed.close()


def test_activations_keep_their_size_through_many_layers(checkpoint: GetFiles, tmp_path: Path) -> None:
    files = shape_of(checkpoint("llama"), tmp_path, num_hidden_layers=80, torch_dtype="float16")
    decoder = load_decoder(files)
    tokens, positions = torch.tensor(PROMPT), torch.arange(len(PROMPT))
    hidden, workspace = decoder.embed(tokens, positions), decoder.workspace(positions)
    for layer in range(80):
        decoder.pre_attention(layer, hidden, workspace)
        # As far as attention can go: to the values of one token.
        attended = workspace.kv[:, 1].repeat_interleave(3, dim=1).contiguous()
        hidden = decoder.post_attention(layer, attended, hidden)
        assert workspace.qkv.abs().max() < 10
    assert 1 < hidden.std() < 20


def test_matrices_are_normal_and_differ_from_one_another(checkpoint: GetFiles) -> None:
    files = replace(checkpoint("llama"), is_dummy=True)
    spec, dummy = open_model(files)
    wide = torch.empty(3000, 1024)
    dummy.fill("a.weight", wide)  # Longer than the noise.
    sorted_values = wide.flatten().sort().values * 32
    assert sorted_values.mean().abs() < 0.01
    assert sorted_values.std() == pytest.approx(1, abs=0.01)
    points = sorted_values[[len(sorted_values) * percent // 100 for percent in (16, 50, 84, 98)]]
    assert points.tolist() == pytest.approx([-0.994, 0.0, 0.994, 2.054], abs=0.02)  # Of the normal distribution.
    assert (wide[1:] != wide[0]).any(dim=1).all()
    assert not torch.equal(wide, torch.empty_like(wide).copy_(wide.roll(1, 0)))
    other = torch.empty_like(wide)
    dummy.fill("b.weight", other)
    assert torch.corrcoef(torch.stack([wide.flatten(), other.flatten()]))[0, 1].abs() < 0.01
    matrices = [
        part for part in tensors(load_weights(dummy, spec, torch.float32, torch.device("cpu"))) if part.ndim == 2
    ]
    assert len({matrix.flatten()[:16].numpy().tobytes() for matrix in matrices}) == len(matrices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_part_is_what_the_whole_has_there(dtype: torch.dtype, checkpoint: GetFiles) -> None:
    """Values follow from the name, whatever else was asked for before."""
    spec, _ = open_model(checkpoint("llama"))
    first, second = torch.empty(7, 48, dtype=dtype), torch.empty(5, 48, dtype=dtype)
    DummyCheckpoint(spec).fill("x.weight", first)
    again = DummyCheckpoint(spec)
    again.fill("y.weight", torch.empty(3, 48))
    again.fill("x.weight", second)
    assert torch.equal(first[:5], second)


def test_weights_that_are_there_are_not_read(checkpoint: GetFiles, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("llama").directory, tmp_path / "whole")
    logits = dense_logits(load_decoder(find_model(str(tmp_path / "whole"), "dummy")), PROMPT)
    (tmp_path / "shape").mkdir()
    assert torch.equal(logits, dense_logits(load_decoder(shape_of(checkpoint("llama"), tmp_path / "shape")), PROMPT))
    assert not torch.equal(logits, dense_logits(load_decoder(checkpoint("llama")), PROMPT))
