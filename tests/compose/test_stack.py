"""The stack of compose/ in a real Docker daemon: it serves, is hardened, survives its services, and leaves nothing.

The tests are one story, in this order.
"""

import json
import os
import shutil
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from openai import AuthenticationError, DefaultHttpxClient, OpenAI
from support.certificates import Authority, Issued
from support.compose import COMPOSE_DIR, SERVICES, ComposeStack, compose, until
from support.reference import TIE, Reference

from neoflex import Client, NeoflexError, Tls
from svc_common.model.store import resolve

PROMPT = "The three largest planets of the solar system are"
STREAM_TOKENS = 160
API_KEY = "a-key-of-the-test"
RUNNING = tuple(name for name in SERVICES if name != "model")
OVERRIDES = ("gpu", "pinned", "memlock", "two-cpu-attn", "observability", "tls")


@pytest.fixture
def client(stack: ComposeStack) -> Iterator[Client]:
    with Client(f"127.0.0.1:{stack.grpc_port}") as client:
        client.wait_until_ready(120)
        yield client


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(resolve("smollm2-135m-instruct"))


def assert_greedy(reference: Reference, prompt: tuple[int, ...], tokens: list[int]) -> None:
    """Each token is the one that transformers would have taken after the ones before it, or as good as that one."""
    logits = reference.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
    taken = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (logits.max(dim=1).values - taken).max() <= TIE


@pytest.fixture(scope="module")
def expected(stack: ComposeStack, reference: Reference) -> list[int]:
    """What is served after the prompt, while nothing has happened yet."""
    with Client(f"127.0.0.1:{stack.grpc_port}") as client:
        tokens = served(client)
        assert_greedy(reference, client.tokenize(PROMPT), tokens)
    return tokens


def served(client: Client) -> list[int]:
    return list(client.generate(PROMPT, max_tokens=32, temperature=0.0, ignore_eos=True, timeout=120).token_ids)


@pytest.mark.parametrize("chosen", [(), *((name,) for name in OVERRIDES), OVERRIDES])
def test_compose_takes_the_overrides_together(chosen: tuple[str, ...]) -> None:
    files = tuple(COMPOSE_DIR / f"{name}.yaml" for name in ("docker-compose", *chosen))
    environ = {"GPU_CPUSET": "0-3", "CPU_ATTN_CPUSET": "4", "TLS_DIR": "/tls"}
    services = json.loads(compose("config", "--format", "json", files=files, environ=environ))["services"]
    added = {"two-cpu-attn": {"cpu-attn-1"}, "observability": {"otel-collector", "prometheus", "grafana"}}
    assert services.keys() == {*SERVICES}.union(*(added.get(name, ()) for name in chosen))
    gpu = services["gpu"]
    assert gpu["image"] == ("neoflex:cuda" if "gpu" in chosen else "neoflex:cpu")
    assert ("devices" in gpu["deploy"]["resources"].get("reservations", {})) == ("gpu" in chosen)
    assert gpu.get("cpuset") == ("0-3" if "pinned" in chosen else None)
    assert ("ulimits" in gpu) == ("memlock" in chosen)
    # Whatever is added, nobody gets more rights and nothing is published beyond this host.
    for service in services.values():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert {port["host_ip"] for port in service.get("ports", ())} <= {"127.0.0.1"}


def test_all_is_healthy_and_hardened(stack: ComposeStack) -> None:
    assert stack.container("model").attrs["State"]["ExitCode"] == 0
    for service in RUNNING:
        container = stack.container(service)
        assert container.attrs["State"]["Health"]["Status"] == "healthy"
        host = container.attrs["HostConfig"]
        assert (host["ReadonlyRootfs"], host["Privileged"], host["PidsLimit"]) == (True, False, 2048)
        assert (host["CapDrop"], host["CapAdd"]) == (["ALL"], None)
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert host["LogConfig"]["Config"] == {"max-size": "10m", "max-file": "5"}
        assert {binding["HostIp"] for ports in (host["PortBindings"] or {}).values() for binding in ports} <= {
            "127.0.0.1"
        }
        # What the kernel says of the process itself.
        status = dict(line.split(":\t", 1) for line in stack.run(service, "cat", "/proc/1/status").splitlines())
        assert status["Uid"].split() == status["Gid"].split() == ["10001"] * 4
        assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
        assert status["NoNewPrivs"] == "1"
        assert container.exec_run(["touch", "/etc/neoflex/file"])[0] != 0
        assert container.exec_run(["touch", "/opt/neoflex/file"])[0] != 0
    assert stack.container("cpu-attn").attrs["HostConfig"]["NanoCpus"] == 1_500_000_000


def test_the_workers_have_no_way_out_and_the_doors_have_no_pool(stack: ComposeStack) -> None:
    for service in ("gpu", "cpu-attn"):
        container = stack.container(service)
        networks = [stack.docker.networks.get(name) for name in container.attrs["NetworkSettings"]["Networks"]]
        assert [network.attrs["Internal"] for network in networks] == [True]
        assert not container.attrs["HostConfig"]["PortBindings"]
    for service, mounts in (("planner", {"sockets", "cache", "models"}), ("gateway", set())):
        found = {mount["Name"] for mount in stack.container(service).attrs["Mounts"] if mount["Type"] == "volume"}
        # The models are this host's in the test.
        assert found == {f"{stack.project}_{name}" for name in mounts - {"models"}}


def test_the_same_tokens_by_grpc_and_by_http(stack: ComposeStack, client: Client, expected: list[int]) -> None:
    assert served(client) == expected
    api = OpenAI(base_url=f"http://127.0.0.1:{stack.http_port}/v1", api_key="none", max_retries=0)
    options = {"ignore_eos": True}
    answer = api.completions.create(
        model="smollm2-135m-instruct", prompt=PROMPT, max_tokens=32, temperature=0, extra_body=options
    )
    assert answer.choices[0].text == client.detokenize(expected)
    pieces = api.completions.create(
        model="smollm2-135m-instruct", prompt=PROMPT, max_tokens=32, temperature=0, extra_body=options, stream=True
    )
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == client.detokenize(expected)


def test_cores_change_while_it_serves(stack: ComposeStack, client: Client, expected: list[int]) -> None:
    most = int(stack.run("cpu-attn", "neoflex", "threads").split()[-1])
    assert stack.run("cpu-attn", "neoflex", "threads", str(most)) == f"{most} of at most {most}\n"
    until(lambda: client.server_info().host_pools[0].num_threads == most, 30, "the planner knows of the threads")
    assert served(client) == expected
    code, output = stack.container("cpu-attn").exec_run(["neoflex", "threads", str(most + 1)])
    assert (code, output.decode()) == (
        1,
        f"error: INVALID_ARGUMENT: num_threads: must be in [1, {most}], is {most + 1}\n",
    )
    assert stack.run("cpu-attn", "neoflex", "threads", "1") == f"1 of at most {most}\n"


class Streams:
    """Some at a time, each in a thread of its own."""

    def __init__(self, client: Client, prompts: list[tuple[int, ...]]) -> None:
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.errors: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._run, args=(client, prompt, tokens))
            for prompt, tokens in zip(prompts, self.tokens, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, client: Client, prompt: tuple[int, ...], tokens: list[int]) -> None:
        try:
            for delta in client.stream(
                token_ids=prompt, max_tokens=STREAM_TOKENS, temperature=0.0, ignore_eos=True, timeout=240
            ):
                tokens.extend(delta.token_ids)
        except Exception as error:
            self.errors.append(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def test_streams_go_on_when_cpu_attn_is_killed(stack: ComposeStack, client: Client, reference: Reference) -> None:
    text = Path(COMPOSE_DIR.parent / "LICENSE").read_text()
    tokens = client.tokenize(text[:3000])
    prompts = [tokens[start : start + 96] for start in (0, 100, 200, 300)]
    streams = Streams(client, prompts)
    until(
        lambda: client.load().host_blocks_used > 0 and all(len(tokens) > 4 for tokens in streams.tokens),
        60,
        "all decode, some on the host",
    )
    num_regions = stack.num_regions()
    assert all(len(tokens) < STREAM_TOKENS for tokens in streams.tokens)
    stack.crash("cpu-attn")
    streams.join()
    assert streams.errors == []
    for prompt, found in zip(prompts, streams.tokens, strict=True):
        assert len(found) == STREAM_TOKENS
        assert_greedy(reference, prompt, found)
    until(lambda: stack.num_regions() > num_regions and _has_all(client), 60, "cpu-attn is attached again")
    assert stack.run("gpu", "ls", "/run/neoflex/segments") == ""


@pytest.mark.parametrize("service", ["cpu-attn", "gpu", "planner", "gateway"])
def test_each_service_may_restart_alone(stack: ComposeStack, client: Client, expected: list[int], service: str) -> None:
    num_regions = stack.num_regions()
    stack.compose("restart", service)
    if service != "gateway":
        until(lambda: stack.num_regions() > num_regions, 120, f"cpu-attn is attached after a restart of {service}")
    until(lambda: client.is_ready() and _has_all(client), 120, f"ready after a restart of {service}")
    assert served(client) == expected


def test_it_serves_again_when_gpu_was_killed(stack: ComposeStack, client: Client, expected: list[int]) -> None:
    num_regions = stack.num_regions()
    stack.crash("gpu")
    until(lambda: stack.num_regions() > num_regions, 120, "cpu-attn is attached after a crash of gpu")
    until(lambda: client.is_ready() and _has_all(client), 120, "ready after a crash of gpu")
    assert served(client) == expected
    until(lambda: stack.container("gateway").attrs["State"]["Health"]["Status"] == "healthy", 60, "gateway is healthy")


def _has_all(client: Client) -> bool:
    return all(pool.num_blocks > 0 for pool in client.server_info().host_pools)


@pytest.fixture
def identities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Issued]:
    """TLS_DIR, and what a client has to show. Private files belong to the containers' user."""
    directory = tmp_path_factory.mktemp("tls")
    authority = Authority(directory / "authority")
    for service in RUNNING:
        own = directory / service
        own.mkdir()
        own.chmod(0o755)
        issued = authority.issue(service, service, "127.0.0.1")
        shutil.copy(issued.ca, own / "ca.pem")
        shutil.copy(issued.certificate, own / "certificate.pem")
        (own / "api-keys").write_text(f"{API_KEY}\n")
        shutil.copy(issued.key, own / "key.pem")
        for private in (own / "key.pem", own / "api-keys"):
            private.chmod(0o600)
            os.chown(private, 10001, 10001)
    return directory, authority.issue("client")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives keys to the containers' user, which takes root")
def test_tls_and_keys_at_the_doors(stack: ComposeStack, expected: list[int], identities: tuple[Path, Issued]) -> None:
    directory, client = identities
    keys = 'api_keys_file = "/etc/neoflex/tls/api-keys"\nclient_certificates = true\n'
    files = "".join(f'{name} = "/etc/neoflex/tls/{name}.pem"\n' for name in ("certificate", "key", "ca"))
    settings = stack.settings.read_text().replace("[planner]\n", f"[planner]\n{keys}")
    stack.settings.write_text(f"{settings}[gateway]\n{keys}[tls]\n{files}")
    up = ("up", "--detach", "--wait", "--wait-timeout", "120", "--no-build", "--no-deps")
    stack.compose(*up, "planner", "gateway", override="tls", environ={"TLS_DIR": str(directory)})
    address, url = f"127.0.0.1:{stack.grpc_port}", f"https://127.0.0.1:{stack.http_port}/v1"
    shown = Tls(client.ca, client.certificate, client.key)
    with Client(address, tls=shown, api_key=API_KEY) as known:
        assert served(known) == expected
    for tls, key, code in ((shown, "wrong", "UNAUTHENTICATED"), (Tls(client.ca), API_KEY, "UNAVAILABLE")):
        with Client(address, tls=tls, api_key=key, max_retries=0) as stranger, pytest.raises(NeoflexError) as refused:
            stranger.model_info()
        assert refused.value.code == code
    context = ssl.create_default_context(cafile=str(client.ca))
    context.load_cert_chain(client.certificate, client.key)
    with DefaultHttpxClient(verify=context) as connection:
        api = OpenAI(base_url=url, api_key=API_KEY, max_retries=0, http_client=connection)
        assert [model.id for model in api.models.list()] == ["smollm2-135m-instruct"]
        with pytest.raises(AuthenticationError):
            api.with_options(api_key="wrong").models.list()
    assert stack.run("planner", "neoflex", "health", "127.0.0.1:50051") == "ok\n"


def test_it_leaves_nothing(stack: ComposeStack) -> None:
    volumes = {volume.attrs["Mountpoint"] for volume in stack.docker.volumes.list()}
    assert len(stack.leftovers()) > len(SERVICES)
    stack.compose("down", "--volumes")
    assert stack.leftovers() == []
    mounted = {line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()}
    assert not mounted & volumes
