"""Weights in one mapped file: the same logits, one copy for all processes, and no trust in what is damaged."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.gpu import VARIANTS, dense_logits, load_decoder
from support.stacks import own_environment

from svc_common.decoder import layer_writer
from svc_common.decoder.checkpoint import open_model
from svc_common.decoder.cpu_decoder import CpuDecoder
from svc_common.decoder.dtypes import DTYPES
from svc_common.decoder.layer_file import LayerFile, LayerFileError
from svc_common.decoder.layer_writer import open_layer_file
from svc_common.decoder.load import Loader
from svc_common.decoder.packing import Bytes
from svc_common.model.store import ModelFiles

PROMPT = [(i * 37 + 11) % 257 for i in range(40)]
Checkpoint = Callable[[str], ModelFiles]


def open_file(files: ModelFiles, directory: Path, dtype: torch.dtype = torch.float32) -> LayerFile:
    return open_layer_file(files, *open_model(files), dtype, directory)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_weights_in_private_memory(variant: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    files = checkpoint(variant)
    for dtype in (torch.float32, torch.bfloat16, DTYPES["int8"], DTYPES["int4"]):
        file = open_file(files, tmp_path, dtype)
        own = load_decoder(files, dtype)
        mapped = file.decoder(range(own.spec.num_layers), vocabulary=True)
        assert mapped.spec == own.spec
        assert mapped.weight_bytes == own.weight_bytes
        assert torch.equal(dense_logits(mapped, PROMPT), dense_logits(own, PROMPT))


def test_a_file_is_written_once_for_each_type_and_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    written = open_file(checkpoint("llama"), tmp_path).path
    first = written.stat()
    assert open_file(checkpoint("llama"), tmp_path).path == written
    again = written.stat()
    assert (again.st_ino, again.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    others = {
        open_file(checkpoint("llama"), tmp_path, torch.bfloat16).path,
        open_file(checkpoint("llama-tied"), tmp_path).path,
    }
    assert len(others | {written}) == 3
    assert sorted(tmp_path.iterdir()) == sorted(others | {written})


def test_a_changed_checkpoint_gets_another_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for path in checkpoint("llama").directory.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    files = ModelFiles("copy", copy)
    before = open_file(files, tmp_path / "layers").path
    (copy / "model.safetensors").touch()
    assert open_file(files, tmp_path / "layers").path != before


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


DAMAGE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a bit of a layer": (lambda path, _: flip(path, path.stat().st_size - 100), "layer.2 is damaged"),
    "a bit of the header": (lambda path, _: flip(path, 60), "the header is damaged"),
    "cut short": (lambda path, _: path.write_bytes(path.read_bytes()[:-4096]), "its header wants"),
    "another version": (lambda path, _: flip(path, 8), "has version 0, wanted is 1"),
    "empty": (lambda path, _: path.write_bytes(b""), "is no file of layers"),
    "no file of ours": (lambda path, _: path.write_bytes(b"GGUF" * 5000), "is no file of layers"),
    "another model's": (lambda path, other: path.write_bytes(other.read_bytes()), "is of another model"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_what_was_written_is_written_anew(
    damage: str, checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = checkpoint("llama")
    path = open_file(files, tmp_path).path
    good = path.read_bytes()
    other = open_file(checkpoint("llama-biases"), tmp_path / "other").path
    spoil, complaint = DAMAGE[damage]
    spoil(path, other)
    assert path.read_bytes() != good
    assert open_file(files, tmp_path).path == path
    assert path.read_bytes() == good
    assert complaint in caplog.text


def test_what_a_killed_writer_left_goes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "tmpabc.part").write_bytes(b"half")
    path = open_file(checkpoint("llama"), tmp_path).path
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_is_killed_leaves_nothing(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there while it packs would stay if it ended here."""
    files, seen = checkpoint("llama"), list[list[Path]]()
    pack = layer_writer._pack

    def watched(name: str, decoder: CpuDecoder, loader: Loader, memory: Bytes) -> None:
        seen.append(list(tmp_path.iterdir()))
        pack(name, decoder, loader, memory)

    monkeypatch.setattr(layer_writer, "_pack", watched)
    path = open_file(files, tmp_path).path
    assert len(seen) > 1
    assert not any(seen)
    assert list(tmp_path.iterdir()) == [path]
    good = path.read_bytes()
    path.unlink()
    seen.clear()
    opened = os.open

    def without_unnamed(name: Path, flags: int, *mode: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return opened(name, flags, *mode)

    monkeypatch.setattr("os.open", without_unnamed)
    assert open_file(files, tmp_path).path.read_bytes() == good
    assert [[found.suffix for found in found_then] for found_then in seen] == [[".part"]] * len(seen)
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_nothing(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(LayerFileError, match="cannot be written: No space left on device"):
        open_file(checkpoint("llama"), tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(LayerFileError, match="has 1000 bytes left, the packed weights take"):
        open_file(checkpoint("llama"), tmp_path)


def test_a_directory_that_cannot_be_had_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LayerFileError, match="file cannot be used: File exists"):
        open_file(checkpoint("llama"), tmp_path / "file")


def test_a_decoder_of_some_layers_has_only_those(checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = open_file(checkpoint("llama"), tmp_path)
    decoder = file.decoder(range(1, 3))
    assert [decoder.is_bound(layer) for layer in range(3)] == [False, True, True]
    assert decoder.weight_bytes == sum(file.layer_bytes[1:])
    positions = torch.arange(2)
    hidden, workspace = torch.ones(2, 48), decoder.workspace(positions)
    decoder.pre_attention(1, hidden, workspace)
    with pytest.raises(RuntimeError, match="layer 0 has no weights here"):
        decoder.pre_attention(0, hidden, workspace)
    with pytest.raises(RuntimeError, match="embedding and head have no weights here"):
        decoder.embed(torch.zeros(2, dtype=torch.int64), positions)


def test_panels_of_another_width_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    files = checkpoint("llama")
    file = open_layer_file(files, *open_model(files), torch.float32, tmp_path, instruction_set="scalar")
    assert file.packing == "panels of 16"
    if file.decoder(range(3), instruction_set="scalar").packing != load_decoder(files).packing:
        with pytest.raises(LayerFileError, match="holds panels of 16, wanted are"):
            file.decoder(range(3))


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """80 MiB in fp32, of which a layer is 4 %."""
    import transformers

    directory = tmp_path_factory.mktemp("deep")
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=24,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return ModelFiles("deep", directory)


_HOLD = """
import sys
from pathlib import Path
import torch
from svc_common.decoder.layer_file import LayerFile
file = LayerFile(Path(sys.argv[1]))
decoder = file.decoder(range(file.spec.num_layers), vocabulary=True)
positions = torch.arange(2)
hidden, workspace = decoder.embed(torch.tensor([1, 2]), positions), decoder.workspace(positions)
for layer in range(file.spec.num_layers):
    decoder.pre_attention(layer, hidden, workspace)
    hidden = decoder.post_attention(layer, workspace.q.contiguous(), hidden)
decoder.logits(hidden)
print("computed", flush=True)
sys.stdin.read()
"""


def mapped_kib(pid: int, name: str) -> dict[str, int]:
    """Fields of /proc/PID/smaps over the mappings of a file."""
    fields: dict[str, int] = {}
    of_this = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if " " in key:
            of_this = line.endswith(name)
        elif of_this and value.endswith("kB"):
            fields[key] = fields.get(key, 0) + int(value.split()[0])
    return fields


def test_two_processes_hold_one_copy(deep_model: ModelFiles, tmp_path: Path) -> None:
    file = open_file(deep_model, tmp_path)
    path, size_kib = file.path, file.num_bytes / 1024
    del file  # This process maps it no more.
    argv = [sys.executable, "-c", _HOLD, str(path)]
    processes = [
        subprocess.Popen(argv, env=own_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"computed\n"
        held = [mapped_kib(process.pid, path.name) for process in processes]
        for fields in held:
            assert fields["Rss"] > 0.98 * size_kib
            assert fields["Anonymous"] == 0
            assert 0.45 * size_kib < fields["Pss"] < 0.55 * size_kib
        assert sum(fields["Pss"] for fields in held) < 1.02 * size_kib
    finally:
        for process in processes:
            process.communicate()


_LIMITED = """
import resource, sys
from pathlib import Path
import torch
from svc_common.decoder.checkpoint import open_model
from svc_common.decoder.layer_writer import open_layer_file
from svc_common.decoder.load import load_decoder
from svc_common.decoder.threads import cpu_threads
from svc_common.model.store import ModelFiles
cpu_threads()
files = ModelFiles("deep", Path(sys.argv[1]))
spec, checkpoint = open_model(files)
status = Path("/proc/self/status").read_text().splitlines()
used = 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + int(sys.argv[3]),) * 2)
try:
    load_decoder(checkpoint, spec, torch.float32, torch.device("cpu"))
except (MemoryError, RuntimeError):
    print("not in private memory")
open_layer_file(files, spec, checkpoint, torch.float32, Path(sys.argv[2]))
print("written")
"""


def test_writing_takes_no_more_private_memory_than_a_layer(deep_model: ModelFiles, tmp_path: Path) -> None:
    """The limit is the kernel's: a layer and 32 MiB, in which the whole model has no room."""
    layer_bytes = open_model(deep_model)[0].layer_bytes(0, 4)
    argv = [sys.executable, "-c", _LIMITED, str(deep_model.directory), str(tmp_path), str(layer_bytes + 32 * 2**20)]
    done = subprocess.run(argv, env=own_environment(), capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split("\n")[:2] == ["not in private memory", "written"], done.stderr
    assert LayerFile(next(tmp_path.glob("*.weights"))).spec.num_layers == 24
