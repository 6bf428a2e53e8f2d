"""Starting, watching, restarting and ending children, with stand-ins for the services."""

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from support import stacks
from support.stacks import is_running, stand_in_stack, until

from neoflex.logs import last_lines
from neoflex.processes import RestartPolicy
from neoflex.supervisor import LocalStack, StackError
from svc_common import config

NOT_AGAIN = RestartPolicy(max_restarts=2, first_backoff_s=0.01, max_backoff_s=0.01)
SERVICES = {"planner_svc", "gpu_svc", "cpu_attn_svc"}


class Bench:
    """A place for one stack: its run directory, its diary and what its supervisor said."""

    def __init__(self, directory: Path) -> None:
        self.run_dir = directory / "run"
        self.diary = directory / "diary"
        self.listen = f"unix:{directory / 'planner.sock'}"
        self.events: list[str] = []
        self.stacks: list[LocalStack] = []

    def stack(self, **options: Any) -> LocalStack:
        stack = stand_in_stack(self.run_dir, self.diary, self.listen, on_event=self.events.append, **options)
        self.stacks.append(stack)
        return stack

    def notes(self) -> list[str]:
        return self.diary.read_text().splitlines() if self.diary.exists() else []


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("PYTHONPATH", stacks.own_environment()["PYTHONPATH"])
    bench = Bench(tmp_path)
    yield bench
    for stack in bench.stacks:
        stack.stop(0)


def test_a_stack_starts_becomes_ready_and_ends_planner_first(bench: Bench) -> None:
    stack = bench.stack()
    stack.start()
    stack.wait_ready(60)
    assert set(stack.pids) == SERVICES
    assert all(is_running(pid) for pid in stack.pids.values())
    assert stack.address == bench.listen
    until(lambda: len(bench.notes()) == 3)
    pids = stack.pids
    stack.stop()
    assert stack.pids == {}
    assert not any(is_running(pid) for pid in pids.values())
    ends = [line for line in bench.notes() if not line.endswith("started")]
    assert ends[:2] == ["planner_svc stopping", "planner_svc stopped"]
    assert {line for line in ends[2:] if line.endswith("stopped")} == {"gpu_svc stopped", "cpu_attn_svc stopped"}
    assert stack.log_paths["gpu_svc"].read_text() == "hello from gpu_svc\n"
    assert bench.events == []


def test_the_run_directory_is_private_and_says_what_runs(bench: Bench) -> None:
    with bench.stack() as stack:
        assert stat.S_IMODE(bench.run_dir.stat().st_mode) == 0o700
        assert config.load(bench.run_dir / "config.toml") == stack.config
        assert stack.config.logging.dump_dir == bench.run_dir
        assert stack.config.gpu.listen == f"unix:{bench.run_dir}/gpu.sock"
        assert stack.config.cpu_attn[0].listen == f"unix:{bench.run_dir}/cpu_attn.sock"
        other = stand_in_stack(bench.run_dir, bench.diary, bench.listen)
        with pytest.raises(StackError, match="another stack runs in"):
            other.start()
    bench.run_dir.chmod(0o755)
    with pytest.raises(StackError, match="must be yours alone: chmod 700"):
        bench.stack().start()


def test_a_run_directory_that_is_a_file_is_refused(bench: Bench) -> None:
    bench.run_dir.write_text("")
    with pytest.raises(StackError, match=r"the run directory \S+ cannot be used: File exists"):
        bench.stack().start()


def test_addresses_of_the_environment_are_not_those_of_its_children(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEOFLEX_PLANNER_LISTEN", "elsewhere:1")
    script = "import os, time; print(os.environ.get('NEOFLEX_PLANNER_LISTEN', 'none'), flush=True); time.sleep(600)"
    stack = bench.stack(argv={"gpu_svc": (sys.executable, "-c", script)})
    stack.start()
    until(lambda: stack.log_paths["gpu_svc"].exists() and stack.log_paths["gpu_svc"].read_text().endswith("\n"))
    assert stack.log_paths["gpu_svc"].read_text() == "none\n"


@pytest.mark.parametrize(
    ("form", "own", "found"), [("json", None, "NONE"), ("json", "ERROR", "ERROR"), ("text", None, "-")]
)
def test_grpcs_core_is_silent_in_a_log_of_json(
    form: str, own: str | None, found: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    if own:
        monkeypatch.setenv("GRPC_VERBOSITY", own)
    script = "import os, time; print(os.environ.get('GRPC_VERBOSITY', '-'), flush=True); time.sleep(600)"
    stack = bench.stack(argv={"gpu_svc": (sys.executable, "-c", script)}, logging={"format": form})
    stack.start()
    until(lambda: stack.log_paths["gpu_svc"].exists() and stack.log_paths["gpu_svc"].read_text().endswith("\n"))
    assert stack.log_paths["gpu_svc"].read_text() == f"{found}\n"


def test_a_child_that_dies_at_start_ends_it_with_its_last_words(bench: Bench) -> None:
    broken = (sys.executable, "-c", "print('no such model'); raise SystemExit(7)")
    stack = bench.stack(argv={"gpu_svc": broken})
    stack.start()
    with pytest.raises(StackError, match=r"gpu_svc exited with code 7\ngpu_svc \| no such model"):
        stack.wait_ready(60)
    assert bench.events == []


def test_a_planner_that_is_never_ready_shows_its_log(bench: Bench) -> None:
    mute = (sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)")
    stack = bench.stack(argv={"planner_svc": mute})
    stack.start()
    until(lambda: last_lines(stack.log_paths["planner_svc"], 1) == ["loading"])
    with pytest.raises(StackError, match=r"not ready within 0\.1 s\nplanner_svc \| loading"):
        stack.wait_ready(0.1)


def test_a_child_that_dies_later_is_started_again(bench: Bench) -> None:
    stack = bench.stack(policy=NOT_AGAIN)
    stack.start()
    stack.wait_ready(60)
    first = stack.pids["cpu_attn_svc"]
    os.kill(first, signal.SIGKILL)
    until(lambda: stack.pids.get("cpu_attn_svc", first) != first)
    assert bench.events == ["cpu_attn_svc was ended by SIGKILL; restart 1 of 2 in 0.01 s"]
    stack.wait_ready(60)
    assert set(stack.pids) == SERVICES


def test_it_gives_up_on_a_child_that_keeps_dying(bench: Bench) -> None:
    once = bench.diary.with_name("once")
    script = (
        f"import pathlib, time; p = pathlib.Path({str(once)!r}); p.exists() and exit(3); p.touch(); time.sleep(600)"
    )
    stack = bench.stack(policy=NOT_AGAIN, argv={"gpu_svc": (sys.executable, "-c", script)})
    stack.start()
    stack.wait_ready(60)
    until(once.exists)
    os.kill(stack.pids["gpu_svc"], signal.SIGTERM)
    until(lambda: "gpu_svc" not in stack.pids and len(bench.events) == 2)

    def has_failed() -> bool:
        try:
            stack.check()
        except StackError as error:
            return str(error).startswith("gpu_svc exited with code 3 after 2 restarts")
        return False

    until(has_failed)


def test_orderly_exits_are_no_restarts(bench: Bench) -> None:
    """However many; the count of deaths goes on where it was."""
    todo = bench.diary.with_name("todo")
    script = (
        f"import pathlib, time; p = pathlib.Path({str(todo)!r})\n"
        "exec(p.read_text() if p.exists() else 'time.sleep(600)')"
    )
    stack = bench.stack(policy=NOT_AGAIN, argv={"gpu_svc": (sys.executable, "-c", script)})
    stack.start()
    stack.wait_ready(60)
    todo.write_text("exit(0)")
    os.kill(stack.pids["gpu_svc"], signal.SIGKILL)
    until(lambda: len(bench.events) > 6)
    todo.write_text("exit(3)")
    until(lambda: stack._children["gpu_svc"].failure is not None)
    assert stack._children["gpu_svc"].failure == "gpu_svc exited with code 3 after 2 restarts"
    assert bench.events[0] == "gpu_svc was ended by SIGKILL; restart 1 of 2 in 0.01 s"
    assert set(bench.events[1:-1]) == {"gpu_svc exited with code 0; started again in 0.01 s"}
    assert bench.events[-1] == "gpu_svc exited with code 3; restart 2 of 2 in 0.01 s"


def test_restarts_back_off_up_to_a_limit() -> None:
    policy = RestartPolicy(first_backoff_s=0.5, max_backoff_s=3)
    assert [policy.backoff_s(n) for n in range(5)] == [0.5, 1, 2, 3, 3]


def test_a_service_that_ignores_sigterm_is_killed(bench: Bench) -> None:
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    stack = bench.stack(argv={"planner_svc": (sys.executable, "-c", script)})
    stack.start()
    until(lambda: last_lines(stack.log_paths["planner_svc"], 1) == ["deaf"])
    pid = stack.pids["planner_svc"]
    stack.stop(drain_s=0.1)
    assert not is_running(pid)


def test_a_host_pool_of_nothing_needs_no_cpu_attention_service(bench: Bench) -> None:
    values = {"planner": {"listen": bench.listen}, "cpu_attn": {"kv_bytes": 0}}
    stack = LocalStack(config.parse(dict(values), "test"), bench.run_dir)
    assert set(stack.log_paths) == {"planner_svc", "gpu_svc"}


def test_a_gateway_is_started_and_ends_with_the_planner(bench: Bench) -> None:
    stack = bench.stack(gateway={"listen": "127.0.0.1:0", "min_drain_s": 0})
    assert set(stack.log_paths) == {*SERVICES, "gateway_svc"}
    stack.start()
    stack.wait_ready(60)
    assert stack.http_url is not None
    assert httpx2.get(f"{stack.http_url}/v1/models").json()["data"][0]["id"] == "tiny"
    pid = stack.pids["gateway_svc"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: stack.pids.get("gateway_svc", pid) != pid and stack.is_ready())
    pid = stack.pids["gateway_svc"]
    hold = Path(f"{bench.diary}.hold")
    hold.touch()  # The planner has something to end still.
    stopping = threading.Thread(target=stack.stop)
    stopping.start()
    until(lambda: not is_running(pid))
    assert "gpu_svc stopping" not in bench.notes()
    hold.unlink()
    stopping.join(60)
    assert last_lines(stack.log_paths["gateway_svc"], 1)[0].endswith("gateway_svc INFO stopped")


def test_without_a_gateway_there_is_no_address(bench: Bench) -> None:
    assert bench.stack().http_url is None
    assert bench.stack(gateway={"listen": "unix:/x"}).http_url == "unix:/x"
    assert bench.stack().console_url is None
    assert bench.stack(gateway={"listen": "unix:/x"}).console_url is None
    assert bench.stack(gateway={"listen": "127.0.0.1:9", "console": False}).console_url is None
    assert bench.stack(gateway={"listen": "127.0.0.1:9"}).console_url == "http://127.0.0.1:9/"


def test_an_address_in_use_is_said_before_anything_starts(bench: Bench) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        bench.listen = f"127.0.0.1:{taken.getsockname()[1]}"
        stack = bench.stack()
        with pytest.raises(StackError) as caught:
            stack.start()
        assert str(caught.value) == (
            f"cannot listen on {bench.listen}: Address already in use;"
            " choose another port, or a free one with: neoflex up --port 0"
        )
        assert stack.pids == {}
    stack.start()  # The failed start left no lock behind.


def test_children_die_with_a_supervisor_that_is_killed(bench: Bench) -> None:
    supervisor = start_supervisor(bench)
    try:
        until(lambda: len(bench.notes()) == 3)
        pids = children_of(supervisor.pid)
        assert len(pids) == 3
    finally:
        supervisor.kill()
        supervisor.wait()
    until(lambda: not any(is_running(pid) for pid in pids))
    assert not [line for line in bench.notes() if line.endswith("stopping")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_drains_on_the_first_signal(bench: Bench, number: signal.Signals) -> None:
    supervisor = start_supervisor(bench)
    try:
        until(lambda: "ready on" in output(bench))
        pids = children_of(supervisor.pid)
        supervisor.send_signal(number)
        assert supervisor.wait(60) == 0
    finally:
        supervisor.kill()
    assert {line for line in bench.notes() if line.endswith("stopped")} == {f"{name} stopped" for name in SERVICES}
    assert not any(is_running(pid) for pid in pids)
    lines = output(bench).splitlines()
    assert "     gpu_svc | hello from gpu_svc" in lines
    assert lines[0] == "starting the services (they load the model and measure this machine) ..."
    assert "stopping: running requests have 30 s to end; a second Ctrl-C stops at once" in lines


def test_up_kills_on_the_second_signal(bench: Bench) -> None:
    hold = Path(f"{bench.diary}.hold")
    hold.touch()
    supervisor = start_supervisor(bench)
    try:
        until(lambda: "ready on" in output(bench))
        pids = children_of(supervisor.pid)
        supervisor.send_signal(signal.SIGINT)
        until(lambda: "planner_svc stopping" in bench.notes())
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(60) == 0
    finally:
        supervisor.kill()
    assert not [line for line in bench.notes() if line.endswith("stopped")]
    assert not any(is_running(pid) for pid in pids)


def test_a_service_that_dies_as_it_drains_is_not_started_again(bench: Bench) -> None:
    hold = Path(f"{bench.diary}.hold")
    hold.touch()
    stack = bench.stack(policy=NOT_AGAIN)
    stack.start()
    stack.wait_ready(60)
    stopping = threading.Thread(target=stack.stop)
    stopping.start()
    until(lambda: "planner_svc stopping" in bench.notes())
    for name in ("gpu_svc", "planner_svc"):
        os.kill(stack.pids[name], signal.SIGKILL)
    hold.unlink()
    stopping.join(60)
    assert not stopping.is_alive()
    assert sum(line.endswith("started") for line in bench.notes()) == 3
    assert bench.events == []
    assert [line for line in bench.notes() if line.endswith("stopped")] == ["cpu_attn_svc stopped"]


def test_up_has_the_services_write_their_state(bench: Bench) -> None:
    supervisor = start_supervisor(bench)
    try:
        until(lambda: "ready on" in output(bench))
        supervisor.send_signal(signal.SIGUSR1)
        until(lambda: sum(line.endswith("asked for its state") for line in bench.notes()) == 3)
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(60) == 0
    finally:
        supervisor.kill()


def start_supervisor(bench: Bench) -> subprocess.Popen[bytes]:
    script = stacks.STAND_IN.with_name("supervise.py")
    command = [sys.executable, str(script), str(bench.run_dir), str(bench.diary), bench.listen]
    with bench.diary.with_name("output").open("wb") as file:
        return subprocess.Popen(command, env=stacks.own_environment(), stdout=file, stderr=subprocess.STDOUT)


def output(bench: Bench) -> str:
    return bench.diary.with_name("output").read_text()


def children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


def test_each_service_of_attention_is_a_child(bench: Bench) -> None:
    config_of_two = config.parse({"planner": {"listen": bench.listen}, "cpu_attn": [{}, {}]}, "test")
    argv = (sys.executable, "-c", "import time; time.sleep(600)")
    commands = dict.fromkeys(("cpu_attn_svc-0", "cpu_attn_svc-1", "gpu_svc", "planner_svc"), argv)
    with LocalStack(config_of_two, bench.run_dir, argv=commands) as stack:
        until(lambda: len(stack.pids) == 4)
        assert set(stack.pids) == set(commands)
        assert stack._services()["cpu_attn_svc-1"] == ("cpu_attn_svc", ("--index", "1"))


def test_a_certificate_that_cannot_be_used_is_said_before_anything_starts(bench: Bench) -> None:
    tls = config.TlsConfig(certificate=Path("/nowhere.pem"), key=Path("/nowhere.key"))
    stack = bench.stack()
    stack.config = stack.config.model_copy(update={"tls": tls})
    with pytest.raises(StackError, match=r"tls\.certificate: /nowhere\.pem: No such file or directory"):
        stack.start()
    assert bench.notes() == []
    bench.stack().start()  # The run directory was let go.
