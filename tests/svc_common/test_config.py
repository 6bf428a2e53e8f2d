"""Each mistake in a configuration is refused in words that name its key."""

import re
from pathlib import Path
from typing import Any

import pytest

from svc_common.config import Config, ConfigError, load, parse

GIB = 2**30


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"bogus": {}}, "test: bogus: unknown key"),
        ({"planner": {"bogus": 1}}, "planner.bogus: unknown key"),
        ({"planner": 3}, "planner: must be a table of keys, is 3"),
        (
            {"planner": {"mode": "fast"}},
            "planner.mode: must be 'auto', 'gpu_only', 'asymmetric', 'same_layer' or 'decoupled', is 'fast'",
        ),
        ({"planner": {"max_batch_tokens": 15}}, "max_batch_tokens: must be greater than or equal to 16, is 15"),
        ({"planner": {"max_batch_tokens": "x"}}, "planner.max_batch_tokens: must be a valid integer, "),
        ({"kv": {"block_tokens": 0}}, "kv.block_tokens: "),
        ({"kv": {"block_tokens": 257}}, "kv.block_tokens: "),
        ({"kv": {"dtype": "int8"}}, "kv.dtype: must be 'auto', 'fp32', 'bf16' or 'fp16', is 'int8'"),
        ({"kv": {"host_dtype": "int4"}}, "kv.host_dtype: must be 'auto', 'fp32', 'bf16', 'fp16' or 'int8', is 'int4'"),
        (
            {"kv": {"host_dtype": "int8"}, "cpu_attn": {"kv_bytes": 0}},
            'kv.host_dtype "int8" needs cpu_attn.kv_bytes greater than 0',
        ),
        ({"gpu": {"kv_bytes": -5}}, "gpu.kv_bytes: not a size such as 64MiB, is -5"),
        ({"gpu": {"kv_bytes": "12 foo"}}, "gpu.kv_bytes: not a size such as 64MiB, is '12 foo'"),
        ({"gpu": {"kv_bytes": "lots"}}, "gpu.kv_bytes: not a size such as 64MiB, is 'lots'"),
        ({"gpu": {"kv_bytes": "1,5GiB"}}, "gpu.kv_bytes: not a size such as 64MiB, is '1,5GiB'"),
        ({"gpu": {"kv_bytes": "1 GiB or so"}}, "gpu.kv_bytes: not a size such as 64MiB, is '1 GiB or so'"),
        ({"gpu": {"kv_bytes": True}}, "gpu.kv_bytes: not a size such as 64MiB, is True"),
        ({"cpu_attn": {"kv_bytes": "99999999999TB"}}, "cpu_attn.kv_bytes: "),
        ({"planner": {"listen": ""}}, "planner.listen: "),
        ({"gpu": {"listen": "localhost"}}, """gpu.listen: must be "host:port" or "unix:path", is 'localhost'"""),
        ({"gpu": {"listen": "unix:"}}, "gpu.listen: "),
        ({"cpu_attn": {"listen": "127.0.0.1:65536"}}, "listen: the port must be from 0 to 65535, is 65536"),
        ({"gpu": {"kv_bytes": 0}, "cpu_attn": {"kv_bytes": 0}}, "test: gpu.kv_bytes and cpu_attn.kv_bytes are both 0"),
        ({"planner": {"mode": "asymmetric"}, "cpu_attn": {"kv_bytes": 0}}, '"asymmetric" needs cpu_attn.kv_bytes'),
        ({"planner": {"mode": "same_layer"}, "cpu_attn": {"kv_bytes": 0}}, '"same_layer" needs cpu_attn.kv_bytes'),
        ({"planner": {"mode": "decoupled"}, "cpu_attn": {"kv_bytes": 0}}, '"decoupled" needs cpu_attn.kv_bytes'),
        ({"planner": {"mode": "gpu_only"}, "gpu": {"kv_bytes": 0}}, '"gpu_only" needs gpu.kv_bytes'),
    ],
)
def test_mistakes(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        parse(values, "test")


def test_what_was_typed_is_named_as_it_was_typed() -> None:
    with pytest.raises(ConfigError, match=r"^--mode: must be .*, is 'fast'; test: planner\.bogus: unknown key$"):
        parse({"planner": {"mode": "fast", "bogus": 1}}, "test", {"planner.mode": "--mode"})


def test_sizes_and_addresses() -> None:
    config = parse({"gpu": {"kv_bytes": "2GiB", "listen": "[::1]:1"}, "planner": {"listen": "unix:/tmp/s"}}, "test")
    assert (config.gpu.kv_bytes, config.gpu.listen, config.planner.listen) == (2 * GIB, "[::1]:1", "unix:/tmp/s")
    assert parse({"cpu_attn": {"kv_bytes": 0}, "planner": {"listen": "host:0"}}, "test").planner.listen == "host:0"


@pytest.mark.parametrize("data", [b"[gpu\n", b"\xff\xfe[gpu]"])
def test_a_file_that_is_no_toml(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    with pytest.raises(ConfigError, match=r"config\.toml: No such file"):
        load(path)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"config\.toml: not TOML"):
        load(path)
    path.write_text("")
    assert load(path) == Config()
