"""Each mistake in a configuration is refused in words that name its key."""

import re
from pathlib import Path
from typing import Any

import pytest

from svc_common.config import ClassConfig, Config, ConfigError, address_names, load, parse

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
        (
            {"gpu": {"dtype": "int8", "device": "cuda"}},
            'test: gpu: dtype "int8" is for device "cpu"; on cuda it is not built',
        ),
        (
            {"gpu": {"device": "cpu", "graph_bytes": "1MiB"}},
            'test: gpu: graph_bytes is 1048576, device "cpu" has no graphs: leave it out',
        ),
        (
            {"gpu": {"device": "cpu", "kv_bytes": "auto"}},
            'test: gpu: kv_bytes "auto" on device "cpu" needs memory_bytes: all else here shares its memory',
        ),
        ({"gpu": {"dtype": "int2"}}, "gpu.dtype: must be 'auto', 'fp32', 'bf16', 'fp16', 'int8' or 'int4', is 'int2'"),
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
        ({"gpu": {"kv_bytes": "99999999999TB"}}, "gpu.kv_bytes: must be less than or equal to 9223372036854775807"),
        ({"gpu": {"memory_bytes": "auto"}}, "gpu.memory_bytes: not a size such as 64MiB, is 'auto'"),
        ({"model": {"load_format": "none"}}, "model.load_format: must be 'auto' or 'dummy', is 'none'"),
        ({"cpu_attn": {"kv_bytes": "99999999999TB"}}, "cpu_attn.kv_bytes: "),
        (
            {"cpu_attn": {"elastic": True, "num_threads": 5, "max_threads": 4}},
            "cpu_attn: with elastic, num_threads must be from min_threads, 1, to max_threads, 4; is 5",
        ),
        (
            {"cpu_attn": {"elastic": True, "min_threads": 2}},
            "cpu_attn: with elastic, num_threads must be from min_threads, 2, to max_threads, the cores there are; ",
        ),
        (
            {"cpu_attn": {"elastic": True, "min_threads": 3, "max_threads": 2, "num_threads": 3}},
            "num_threads must be from min_threads, 3, to max_threads, 2; is 3",
        ),
        (
            {"cpu_attn": {"elastic": True, "kv_bytes": 0}},
            "test: cpu_attn.elastic needs cpu_attn.kv_bytes greater than 0",
        ),
        ({"cpu_attn": {"min_threads": 0}}, "cpu_attn.min_threads: must be greater than or equal to 1, is 0"),
        ({"model": {"source": ""}}, "model.source: must not be empty"),
        ({"planner": {"listen": ""}}, "planner.listen: "),
        ({"gpu": {"listen": "localhost"}}, """gpu.listen: must be "host:port" or "unix:path", is 'localhost'"""),
        ({"gpu": {"listen": "unix:"}}, "gpu.listen: "),
        ({"cpu_attn": {"listen": "127.0.0.1:65536"}}, "listen: the port must be from 0 to 65535, is 65536"),
        ({"gpu": {"kv_bytes": 0}, "cpu_attn": {"kv_bytes": 0}}, "test: gpu.kv_bytes and cpu_attn.kv_bytes are both 0"),
        ({"planner": {"mode": "asymmetric"}, "cpu_attn": {"kv_bytes": 0}}, '"asymmetric" needs cpu_attn.kv_bytes'),
        ({"planner": {"mode": "same_layer"}, "cpu_attn": {"kv_bytes": 0}}, '"same_layer" needs cpu_attn.kv_bytes'),
        ({"planner": {"mode": "decoupled"}, "cpu_attn": {"kv_bytes": 0}}, '"decoupled" needs cpu_attn.kv_bytes'),
        ({"planner": {"mode": "gpu_only"}, "gpu": {"kv_bytes": 0}}, '"gpu_only" needs gpu.kv_bytes'),
        ({"planner": {"classes": 3}}, "planner.classes: must be a table of keys, is 3"),
        ({"planner": {"classes": {}}}, "planner.classes: must be from 1 to 32 classes, are 0"),
        (
            {"planner": {"classes": {str(number): {} for number in range(33)}}},
            "planner.classes: must be from 1 to 32 classes, are 33",
        ),
        (
            {"planner": {"classes": {"a b": {}}}},
            "planner.classes: a name must be of 1 to 64 letters, digits, - and _, is 'a b'",
        ),
        (
            {"planner": {"drain_s": 10}, "gateway": {"min_drain_s": 16}},
            "test: gateway.min_drain_s must be at most 15, 5 s more than planner.drain_s, is 16",
        ),
        ({"planner": {"classes": {"chat": {}}}}, "test: planner.default_class must be one of chat, is 'default'"),
        (
            {"planner": {"classes": {"default": {"ttft_s": 1}}}},
            "planner.classes.default: ttft_s and tpot_s go together, tpot_s is missing",
        ),
        (
            {"planner": {"classes": {"default": {"ttft_s": 0, "tpot_s": 1}}}},
            "planner.classes.default.ttft_s: must be greater than 0, is 0",
        ),
        ({"planner": {"classes": {"default": {"ttft_s": 86401, "tpot_s": 1}}}}, "must be less than or equal to 86400"),
        ({"planner": {"classes": {"default": {"ttft_s": float("nan"), "tpot_s": 1}}}}, "default.ttft_s: must be "),
        (
            {"planner": {"classes": {"default": {"priority": 101}}}},
            "planner.classes.default.priority: must be less than or equal to 100, is 101",
        ),
        ({"planner": {"classes": {"default": {"share": 0}}}}, "planner.classes.default.share: must be greater than or"),
        (
            {"planner": {"classes": {"default": {"on_overload": "panic"}}}},
            "planner.classes.default.on_overload: must be 'queue' or 'refuse', is 'panic'",
        ),
        ({"planner": {"classes": {"default": {"ttft": 1}}}}, "planner.classes.default.ttft: unknown key"),
        ({"cpu_attn": 3}, "test: cpu_attn: "),
        ({"cpu_attn": []}, "test: cpu_attn: "),
        ({"cpu_attn": [{"threads": 1}]}, "test: cpu_attn.threads: unknown key"),
        ({"cpu_attn": [{}, {"num_threads": 0}]}, "test: cpu_attn[1].num_threads: must be greater than or equal to 1"),
        (
            {"cpu_attn": [{}, {"kv_bytes": 0}]},
            "test: cpu_attn[1].kv_bytes is 0: of several services each needs a pool",
        ),
        (
            {"cpu_attn": [{"listen": "unix:/a"}, {}, {"listen": "unix:/a"}]},
            "test: cpu_attn[2].listen is that of cpu_attn[0], unix:/a: each needs its own",
        ),
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


def test_without_classes_there_is_one_without_targets() -> None:
    assert Config().planner.classes == {"default": ClassConfig()}
    assert ClassConfig().ttft_s is None
    assert ClassConfig().on_overload == "queue"


def test_limits_of_threads_bind_only_where_the_planner_changes_them() -> None:
    assert not parse({"cpu_attn": {"num_threads": 5, "max_threads": 4}}, "test").cpu_attn[0].elastic
    host = parse({"cpu_attn": {"elastic": True, "num_threads": 5, "min_threads": 5}}, "test").cpu_attn[0]
    assert (host.min_threads, host.num_threads, host.max_threads) == (5, 5, 0)


def test_several_services_of_attention(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[[cpu_attn]]\nlisten = "unix:/a"\n[[cpu_attn]]\nlisten = "unix:/b"\nkv_bytes = "1MiB"\n')
    config = load(path)
    assert [service.listen for service in config.cpu_attn_services] == ["unix:/a", "unix:/b"]
    assert [config.cpu_attn_key(index) for index in (0, 1)] == ["cpu_attn[0]", "cpu_attn[1]"]
    path.write_text("[cpu_attn]\nkv_bytes = 0\n")
    assert load(path).cpu_attn_services == ()
    # For `neoflex up`, which gives them addresses, this is enough; a service must be told.
    path.write_text("[[cpu_attn]]\n[[cpu_attn]]\n")
    assert len(parse({"cpu_attn": [{}, {}]}, "test").cpu_attn) == 2
    with pytest.raises(ConfigError, match=r"cpu_attn\[1\]\.listen is that of cpu_attn\[0\], 127\.0\.0\.1:50053"):
        load(path)


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


class TestAddressesOfTheEnvironment:
    """A file of several services, one of which a variable may move."""

    FILE = '[planner]\nlisten = "127.0.0.1:1"\nmode = "gpu_only"\n[[cpu_attn]]\nkv_bytes = "1GiB"\n'
    TWO = '[[cpu_attn]]\nlisten = "unix:/a"\n[[cpu_attn]]\nlisten = "unix:/b"\n'

    @staticmethod
    def loaded(directory: Path, text: str, **environ: str) -> Config:
        file = directory / "c.toml"
        file.write_text(text)
        return load(file, environ)

    def test_each_goes_over_the_file_and_nothing_else_does(self, tmp_path: Path) -> None:
        config = self.loaded(
            tmp_path,
            self.FILE,
            NEOFLEX_PLANNER_LISTEN="0.0.0.0:50051",
            NEOFLEX_GPU_LISTEN="unix:/run/gpu",
            NEOFLEX_CPU_ATTN_LISTEN="unix:/run/cpu",
            NEOFLEX_GATEWAY_LISTEN="[::1]:80",
            PATH="/bin",
            NEOFLEX_API_KEY="a client's",
        )
        assert (config.planner.listen, config.planner.mode) == ("0.0.0.0:50051", "gpu_only")
        assert config.gpu.listen == "unix:/run/gpu"
        assert [(service.listen, service.kv_bytes) for service in config.cpu_attn] == [("unix:/run/cpu", GIB)]
        assert config.gateway is not None
        assert config.gateway.listen == "[::1]:80"

    def test_without_any_the_file_holds(self, tmp_path: Path) -> None:
        assert self.loaded(tmp_path, self.FILE) == parse({"planner": {"listen": "127.0.0.1:1", "mode": "gpu_only"}}, "")

    def test_several_services_of_attention_have_one_each(self, tmp_path: Path) -> None:
        config = self.loaded(tmp_path, self.TWO, NEOFLEX_CPU_ATTN_LISTEN="cpu-0:7, cpu-1:7")
        assert [service.listen for service in config.cpu_attn] == ["cpu-0:7", "cpu-1:7"]

    @pytest.mark.parametrize(
        ("text", "environ", "complaint"),
        [
            (FILE, {"NEOFLEX_PLANNER_LISTEN": "planner"}, '^NEOFLEX_PLANNER_LISTEN: must be "host:port" or'),
            (FILE, {"NEOFLEX_GPU_LISTEN": "gpu:70000"}, "^NEOFLEX_GPU_LISTEN: the port must be from 0 to 65535, is"),
            (FILE, {"NEOFLEX_CPU_ATTN_LISTEN": "x"}, '^NEOFLEX_CPU_ATTN_LISTEN: must be "host:port" or'),
            (
                FILE,
                {"NEOFLEX_CPU_ATTN_LISTEN": "a:1,b:2"},
                r"^NEOFLEX_CPU_ATTN_LISTEN: 2 addresses, one for each \[\[cpu_attn\]\] would be 1$",
            ),
            (TWO, {"NEOFLEX_CPU_ATTN_LISTEN": "a:1,b"}, '^NEOFLEX_CPU_ATTN_LISTEN: must be "host:port" or'),
            (TWO, {"NEOFLEX_CPU_ATTN_LISTEN": "a:1"}, r"cpu_attn\[1\].listen is that of cpu_attn\[0\], a:1"),
            (
                FILE,
                {"NEOFLEX_GPU_LISTENS": "a:1", "NEOFLEX_MODE": "auto"},
                "^NEOFLEX_GPU_LISTENS, NEOFLEX_MODE: unknown; the environment may set NEOFLEX_CPU_ATTN_LISTEN, ",
            ),
            ('planner = "x"\n', {"NEOFLEX_PLANNER_LISTEN": "a:1"}, "planner: must be a table of keys, is 'x'"),
        ],
    )
    def test_mistakes_name_the_variable(
        self, tmp_path: Path, text: str, environ: dict[str, str], complaint: str
    ) -> None:
        with pytest.raises(ConfigError, match=complaint):
            self.loaded(tmp_path, text, **environ)

    def test_every_address_has_a_name(self) -> None:
        assert {
            "NEOFLEX_PLANNER_LISTEN": ("planner", "listen"),
            "NEOFLEX_GPU_LISTEN": ("gpu", "listen"),
            "NEOFLEX_CPU_ATTN_LISTEN": ("cpu_attn", "listen"),
            "NEOFLEX_GATEWAY_LISTEN": ("gateway", "listen"),
        }.items() <= address_names().items()


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"planner": {"client_certificates": True}}, "planner.client_certificates needs [tls] with a ca"),
        (
            {"gateway": {"client_certificates": True}, "tls": {"certificate": "c", "key": "k"}},
            "gateway.client_certificates needs [tls] with a ca",
        ),
        (
            {
                "planner": {"client_certificates": True, "listen": "unix:/p"},
                "tls": {"certificate": "c", "key": "k", "ca": "a"},
            },
            "planner.client_certificates has no effect: planner.listen is a Unix socket",
        ),
        ({"gateway": {"certificate": "c"}}, "gateway: certificate and key go together, key is missing"),
        ({"tls": {"certificate": "c"}}, "test: tls.key: is missing"),
        ({"tls": {"certificate": "c", "key": "k", "cas": "a"}}, "tls.cas: unknown key"),
    ],
)
def test_access_that_contradicts_itself(sections: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(sections, "test")
    assert complaint in str(caught.value)
