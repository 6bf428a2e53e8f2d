"""What the real executor takes while it loads a model: no more memory than the model and one layer."""

import json
import sys

from support.executor import executor_status

from neoflex.supervisor import LocalStack
from svc_common.config import parse
from svc_common.model.store import ModelFiles

NUM_LAYERS, LAYER_BYTES, VOCABULARY_BYTES = 30, 14_160_384, 113_248_512
"""Of the default model in fp32."""
_HUGE_PAGE_BYTES = 2 * 2**20
_HEADROOM_BYTES = 64 * 2**20
"""For what is no weights: program code that is first run while loading, and what allocators and huge pages keep."""

MEASURED_EXECUTOR = """
import json, sys
from pathlib import Path
import gpu_svc.__main__ as service
from svc_common.decoder.threads import cpu_threads

load = service.load_for_device

def resident_bytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))

def loading_measured(*arguments):
    cpu_threads()
    Path("/proc/self/clear_refs").write_text("5")  # The kernel's highest resident size begins anew.
    before = resident_bytes("VmRSS")
    decoder = load(*arguments)
    Path(PATH).write_text(json.dumps(resident_bytes("VmHWM") - before))
    return decoder

service.load_for_device = loading_measured
service.main()
"""


def in_huge_pages(num_bytes: int) -> int:
    return -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES


def test_loading_takes_no_more_than_the_model_and_a_layer(files: ModelFiles, tmp_path):
    """The kernel's peak, in which a second embedding, of 108 MiB, has no room; it also counts the pages of
    the checkpoint's file, which is mapped. What the checkpoint's directory takes, its vocabulary's texts above all, was
    there before.
    """
    tmp_path.chmod(0o700)
    config = parse(
        {
            "planner": {"listen": "127.0.0.1:0", "max_batch_tokens": 64, "max_sequence_tokens": 512},
            "gpu": {"device": "cpu", "dtype": "fp32", "profile": "always", "kv_bytes": "16MiB"},
            "cpu_attn": {"kv_bytes": 0},
        },
        "test",
    )
    script = MEASURED_EXECUTOR.replace("Path(PATH)", "Path(" + repr(str(tmp_path / "peak.json")) + ")")
    argv = (sys.executable, "-P", "-c", script, "--config", str(tmp_path / "config.toml"))
    with LocalStack(config, tmp_path, argv={"gpu_svc": argv}) as stack:
        stack.wait_ready(120)
        status = executor_status(stack)
    assert status.memory.layer_bytes == LAYER_BYTES
    assert status.weight_bytes == NUM_LAYERS * LAYER_BYTES + VOCABULARY_BYTES
    assert files.gguf is not None
    model_bytes = in_huge_pages(VOCABULARY_BYTES) + NUM_LAYERS * in_huge_pages(LAYER_BYTES)
    peak_bytes = json.loads((tmp_path / "peak.json").read_text()) - files.gguf.stat().st_size
    print(f"\nat most {peak_bytes:,} bytes, the model takes {model_bytes:,}")
    assert status.weight_bytes < peak_bytes <= model_bytes + LAYER_BYTES + _HEADROOM_BYTES
