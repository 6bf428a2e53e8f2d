"""What the real executor takes while it loads a model: no more memory than the model and one layer."""

import sys
from pathlib import Path

from support.executor import executor_status

from neoflex.supervisor import LocalStack
from svc_common.config import parse

NUM_LAYERS, LAYER_BYTES, VOCABULARY_BYTES = 30, 14_160_384, 113_248_512
"""Of the default model in fp32."""
_HUGE_PAGE_BYTES = 2 * 2**20
_HEADROOM_BYTES = 8 * 2**20
"""For what is no weights: the file's directory of tensors, for one."""

LIMITED_EXECUTOR = """
import resource, sys
from pathlib import Path
import gpu_svc.__main__ as service
from svc_common.decoder.threads import cpu_threads

load = service.make_executor

def loading_within_limit(config):
    cpu_threads()
    status = Path("/proc/self/status").read_text().splitlines()
    used = 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + LIMIT_BYTES, before[1]))
    try:
        return load(config)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)

service.make_executor = loading_within_limit
service.main()
"""


def stack_with_limit(run_dir: Path, limit_bytes: int, **gpu: object) -> LocalStack:
    """The real services; the executor's private memory is limited by the kernel while it loads."""
    config = parse(
        {
            "planner": {"listen": "127.0.0.1:0", "max_batch_tokens": 64, "max_sequence_tokens": 512},
            "gpu": {"device": "cpu", "dtype": "fp32", "profile": "always", "kv_bytes": "16MiB", **gpu},
            "cpu_attn": {"kv_bytes": 0},
        },
        "test",
    )
    script = LIMITED_EXECUTOR.replace("LIMIT_BYTES", str(limit_bytes))
    argv = (sys.executable, "-P", "-c", script, "--config", str(run_dir / "config.toml"))
    return LocalStack(config, run_dir, argv={"gpu_svc": argv})


def in_huge_pages(num_bytes: int) -> int:
    return -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES


def test_loading_takes_no_more_than_the_model_and_a_layer(tmp_path):
    """By the kernel's account of private memory, in which embedding or head in fp32 twice would have no room."""
    tmp_path.chmod(0o700)
    model_bytes = in_huge_pages(VOCABULARY_BYTES) + NUM_LAYERS * in_huge_pages(LAYER_BYTES)
    with stack_with_limit(tmp_path, model_bytes + LAYER_BYTES + _HEADROOM_BYTES) as stack:
        stack.wait_ready(120)
        status = executor_status(stack)
        assert status.memory.layer_bytes == LAYER_BYTES
        assert status.weight_bytes == NUM_LAYERS * LAYER_BYTES + VOCABULARY_BYTES
