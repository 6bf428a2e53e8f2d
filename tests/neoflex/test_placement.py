"""Addresses of a local stack, and the configuration file that its services read."""

import socket
from pathlib import Path

import pytest
from support.certificates import Authority

from neoflex.placement import AddressInUseError, accepts, place, socket_fits, to_toml
from svc_common.config import Config, ConfigError, GatewayConfig, load, parse


def test_inner_services_get_sockets_unless_they_have_an_address(tmp_path: Path) -> None:
    config = parse({"planner": {"listen": "unix:/p.sock"}, "gpu": {"listen": "127.0.0.1:7"}}, "test")
    placed = place(config, tmp_path)
    assert placed.planner.listen == "unix:/p.sock"
    assert placed.gpu.listen == "127.0.0.1:7"
    assert placed.cpu_attn[0].listen == f"unix:{tmp_path}/cpu_attn.sock"
    assert place(placed, Path("/elsewhere")) == placed


def test_port_0_becomes_a_free_port(tmp_path: Path) -> None:
    host, _, port = place(parse({"planner": {"listen": "127.0.0.1:0"}}, "test"), tmp_path).planner.listen.rpartition(
        ":"
    )
    assert host == "127.0.0.1"
    assert int(port) > 0


def test_the_gateway_takes_its_port_or_a_free_one(tmp_path: Path) -> None:
    def placed(**gateway: object) -> str:
        done = place(parse({"planner": {"listen": "127.0.0.1:0"}, "gateway": gateway}, "test"), tmp_path).gateway
        assert done is not None
        return done.listen

    assert int(placed(listen="127.0.0.1:0").rpartition(":")[2]) > 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert accepts(address)
        with pytest.raises(AddressInUseError, match=r"a free one with: neoflex up --http 127\.0\.0\.1:0"):
            placed(listen=address)
        # What nobody asked for by name gives way.
        gateway = GatewayConfig.model_construct(listen=address)
        gateway.model_fields_set.clear()
        config = parse({"planner": {"listen": "127.0.0.1:0"}}, "test").model_copy(update={"gateway": gateway})
        given_way = place(config, tmp_path).gateway
        assert given_way is not None
        assert given_way.listen.startswith("127.0.0.1:")
        assert given_way.listen != address
    assert not accepts(address)
    assert not accepts(f"unix:{tmp_path}/none")
    assert place(parse({"planner": {"listen": "127.0.0.1:0"}}, "test"), tmp_path).gateway is None


def test_the_file_holds_the_gateway(tmp_path: Path) -> None:
    gateway = {"cors_origins": ["https://a", "https://b"], "api_keys_file": "/keys", "max_body_bytes": "1MiB"}
    config = parse({"gateway": gateway}, "t")
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert load(path) == config
    path.write_text(to_toml(parse({"gateway": {}}, "t")))
    assert load(path).gateway == GatewayConfig()


def test_an_address_of_another_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AddressInUseError, match=r"cannot listen on 192\.0\.2\.1:50051"):
        place(parse({"planner": {"listen": "192.0.2.1:50051"}}, "test"), tmp_path)


def test_two_listeners_at_one_address_are_refused(tmp_path: Path) -> None:
    metrics = {"metrics_listen": "127.0.0.1:9466"}
    config = parse({"planner": {"listen": "127.0.0.1:0"}, "cpu_attn": [metrics, metrics]}, "test")
    with pytest.raises(AddressInUseError) as refusal:
        place(config, tmp_path)
    names = "cpu_attn[0].metrics_listen and cpu_attn[1].metrics_listen"
    assert str(refusal.value) == f"{names} are both 127.0.0.1:9466: each needs its own"
    free = {"metrics_listen": "127.0.0.1:0"}
    place(parse({"planner": {"listen": "127.0.0.1:0"}, "cpu_attn": [free, free]}, "test"), tmp_path)


@pytest.mark.parametrize("port", ["-1", "99999", "http"])
def test_a_port_that_is_none_is_refused(port: str, tmp_path: Path) -> None:
    config = Config()
    planner = config.planner.model_copy(update={"listen": f"127.0.0.1:{port}"})  # Unchecked by Config.
    with pytest.raises(AddressInUseError, match=rf":{port}: the port must be from 0 to 65535$"):
        place(config.model_copy(update={"planner": planner}), tmp_path)


@pytest.mark.parametrize(("num_bytes", "fits"), [(107, True), (108, False)])
def test_sockets_need_a_short_path(num_bytes: int, fits: bool) -> None:
    directory = "/" + "ü" * ((num_bytes - len("//cpu_attn.sock")) // 2)
    directory += "x" * (num_bytes - len(f"{directory}/cpu_attn.sock".encode()))
    assert socket_fits(Config(), Path(directory)) is fits


def test_the_file_says_what_the_values_say(tmp_path: Path) -> None:
    odd = 'a "quoted"\\path\nwith 日本語 🙂 and \x7f'
    config = parse(
        {"model": {"source": odd}, "gpu": {"kv_bytes": "1.5MiB"}, "planner": {"max_waiting_requests": 7}}, "t"
    )
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert load(path) == config
    assert "kv_bytes = 1572864\n" in path.read_text()
    assert "max_sequence_tokens" not in path.read_text()
    path.write_text(to_toml(Config()))
    assert load(path) == Config()


def test_the_file_holds_the_service_classes(tmp_path: Path) -> None:
    chat = {"ttft_s": 0.5, "tpot_s": 0.05, "priority": -3, "share": 2.5, "on_overload": "refuse"}
    config = parse({"planner": {"classes": {"chat_1": chat, "batch-2": {}}, "default_class": "batch-2"}}, "t")
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert load(path) == config


def test_each_service_of_attention_gets_a_socket(tmp_path: Path) -> None:
    config = parse({"planner": {"listen": "unix:/p"}, "cpu_attn": [{"kv_bytes": "1MiB"}, {"listen": "unix:/b"}]}, "t")
    placed = place(config, tmp_path)
    assert [service.listen for service in placed.cpu_attn] == [f"unix:{tmp_path}/cpu_attn-0.sock", "unix:/b"]
    path = tmp_path / "config.toml"
    path.write_text(to_toml(placed))
    assert load(path) == placed
    assert path.read_text().count("[[cpu_attn]]\n") == 2


def test_services_trust_the_certificate_that_they_share(tmp_path: Path) -> None:
    issued = Authority(tmp_path / "ca").issue("services", "*.example.com", "127.0.0.1")
    pair = {"certificate": str(issued.certificate), "key": str(issued.key)}
    tls = place(parse({"planner": {"listen": "unix:/p"}, "tls": pair}, "test"), tmp_path).tls
    assert tls is not None
    assert (tls.server_name, tls.ca) == ("planner.example.com", issued.certificate)
    own = {**pair, "ca": str(issued.ca), "server_name": "llm.example.com"}
    config = parse({"planner": {"listen": "unix:/p"}, "tls": own}, "test")
    placed = place(config, tmp_path)
    assert placed.tls == config.tls
    (tmp_path / "config.toml").write_text(to_toml(placed))
    assert load(tmp_path / "config.toml").tls == config.tls
    issued.key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"tls\.key: .*its mode is 0644"):
        place(config, tmp_path)
