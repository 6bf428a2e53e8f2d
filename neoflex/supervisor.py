"""The services as children of this process: started, watched, restarted, drained.

with LocalStack(config, run_dir) as stack:
    stack.wait_ready(300)
    Client(stack.address)...
"""

import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from neoflex.access import Tls
from neoflex.client import Client
from neoflex.errors import NeoflexError
from neoflex.logs import last_lines
from neoflex.placement import AddressInUseError, accepts, cpu_attn_suffix, place, socket_fits, to_toml
from neoflex.processes import EventSink, RestartPolicy, ServiceCommand, SupervisedProcess
from neoflex.types import ModelInfo, ServerInfo
from svc_common.config import Config, ConfigError
from svc_common.security.api_keys import planner_key

PLANNER = "planner_svc"
_CPU_ATTN = "cpu_attn_svc"
GATEWAY = "gateway_svc"
_EXIT_S = 10.0
_POLL_S = 0.1
_SHOWN_LOG_LINES = 20
_SILENT_CORE = {"GRPC_VERBOSITY": "NONE"}
"""gRPC's core writes lines of its own form to standard error, and reads this as it is imported."""


class StackError(Exception):
    """The services cannot run. The text holds the last lines of the log of the one that failed."""


class LocalStack:
    """planner_svc, gpu_svc, each cpu_attn_svc, none where the only one's kv_bytes is 0, and gateway_svc where the
    configuration has it.

    Of several cpu_attn_svc the first is named cpu_attn_svc-0.

    `run_dir` is created with mode 0700 and holds config.toml, a log file per service and the inner sockets; one stack
    at a time may use it. The children die with this process, however it ends. Until the stack was ready once, a child
    that dies is an error; later on it is started again. Not for use by several threads.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        on_event: EventSink | None = None,
        policy: RestartPolicy | None = None,
        argv: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """`argv`: what to run in place of `python -m SERVICE --config FILE`, by service."""
        self.config = config
        """As the services see it, once started: with the addresses they listen on."""
        self.run_dir = run_dir.absolute()
        self._on_event = on_event or (lambda line: None)
        self._policy = policy or RestartPolicy()
        self._argv = argv or {}
        self._children: dict[str, SupervisedProcess] = {}
        self._lock_handle: int | None = None
        self._socket_dir: Path | None = None
        self._client: Client | None = None

    @property
    def address(self) -> str:
        """Where the planner answers."""
        return self.config.planner.listen

    @property
    def http_url(self) -> str | None:
        """Where the gateway answers; None without one. Of a Unix socket, its address."""
        if self.config.gateway is None:
            return None
        listen = self.config.gateway.listen
        return listen if listen.startswith("unix:") else f"{self._http_scheme}://{listen}"

    @property
    def console_url(self) -> str | None:
        """Where a browser finds the gateway's page; None where there is none, or on a Unix socket."""
        gateway = self.config.gateway
        if gateway is None or not gateway.console or gateway.listen.startswith("unix:"):
            return None
        return f"{self._http_scheme}://{gateway.listen}/"

    @property
    def _http_scheme(self) -> str:
        gateway = self.config.gateway
        return "https" if self.config.tls or (gateway and gateway.certificate) else "http"

    @property
    def pids(self) -> dict[str, int]:
        """Of the children that run now, by service."""
        return {name: pid for name, process in self._children.items() if (pid := process.pid) is not None}

    @property
    def log_paths(self) -> dict[str, Path]:
        return {name: self.run_dir / f"{name}.log" for name in self._services()}

    def start(self) -> None:
        """Starts all services. Raises StackError where the run directory or an address can't be had."""
        self._lock_run_dir()
        try:
            self.config = place(_with_dumps(self.config, self.run_dir), self._sockets())
            client = self.connect()
        except (AddressInUseError, ConfigError, NeoflexError) as error:
            self._release()
            raise StackError(str(error)) from error
        config_path = self.run_dir / "config.toml"
        with self._using_run_dir():
            config_path.write_text(to_toml(self.config))
        self._client = client
        environment = _SILENT_CORE if self.config.logging.format == "json" else {}
        for name, (module, options) in self._services().items():
            # -P: what lies in the current directory is not ours to run.
            argv = (sys.executable, "-P", "-m", module, "--config", str(config_path), *options)
            argv = self._argv.get(name, argv)
            command = ServiceCommand(name, argv, self.log_paths[name], environment)
            self._children[name] = SupervisedProcess(command, self._policy, self._on_event)
        for process in self._children.values():
            process.start()

    def connect(self) -> Client:
        """A client of the started planner, with the services' own certificate and key. Raises ConfigError."""
        tls = self.config.tls
        # The planner shows this very certificate: nothing else needs to be trusted.
        own = tls and Tls(tls.certificate, tls.certificate, tls.key, tls.server_name)
        return Client(self.address, tls=own or False, api_key=planner_key(self.config) or "")

    def is_ready(self) -> bool:
        """Whether requests are answered now. Raises StackError where a service is gone for good."""
        self.check()
        if self._client is None or not self._client.is_ready():
            return False
        if self.config.gateway is not None and not accepts(self.config.gateway.listen):
            return False
        for process in self._children.values():
            process.allow_restarts()
        return True

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Returns once requests are answered. Raises StackError where a service dies, or when time is up."""
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            if time.monotonic() > deadline:
                raise StackError(f"not ready within {timeout_s:g} s\n{self._tail(PLANNER)}")
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raises StackError where a service is gone for good."""
        for name, process in self._children.items():
            if process.failure is not None:
                raise StackError(f"{process.failure}\n{self._tail(name)}")

    def server_info(self) -> ServerInfo:
        with self.connect() as client:
            return client.server_info()

    def model_info(self) -> ModelInfo:
        with self.connect() as client:
            return client.model_info()

    def stop(self, drain_s: float | None = None) -> None:
        """Lets running requests end, then ends the services: planner and gateway first, which drain. Never raises.

        `drain_s`: so long these two may take; by default what the configuration leaves them.
        """
        for process in self._children.values():
            process.forbid_restarts()
        doors = [process for name, process in self._children.items() if name in (PLANNER, GATEWAY)]
        workers = [process for name, process in self._children.items() if name not in (PLANNER, GATEWAY)]
        _end(doors, self.config.stop_s if drain_s is None else drain_s)
        _end(workers, _EXIT_S)
        self._children.clear()
        self._release()

    def ask_for_dumps(self) -> None:
        """Has each service write its state into the run directory. Fit for signal handlers."""
        for process in self._children.values():
            process.signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Ends the services at once; `stop` still has to be called, or is being called. Fit for signal handlers."""
        for process in self._children.values():
            process.signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _services(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """By name what to run, and with which options."""
        num_hosts = len(self.config.cpu_attn_services)
        hosts = {
            f"{_CPU_ATTN}{cpu_attn_suffix(self.config, index)}": (
                _CPU_ATTN,
                ("--index", str(index)) if num_hosts > 1 else (),
            )
            for index in range(num_hosts)
        }
        gateway = {GATEWAY: (GATEWAY, ())} if self.config.gateway else {}
        return {**hosts, "gpu_svc": ("gpu_svc", ()), PLANNER: (PLANNER, ()), **gateway}

    def _tail(self, name: str) -> str:
        return "\n".join(f"{name} | {line}" for line in last_lines(self.log_paths[name], _SHOWN_LOG_LINES))

    @contextmanager
    def _using_run_dir(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._release()
            raise StackError(f"the run directory {self.run_dir} cannot be used: {error.strerror}") from error

    def _lock_run_dir(self) -> None:
        with self._using_run_dir():
            self.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.run_dir.stat()
            handle = os.open(self.run_dir, os.O_RDONLY | os.O_DIRECTORY)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            os.close(handle)
            raise StackError(f"{self.run_dir} must be yours alone: chmod 700 {self.run_dir}")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise StackError(f"another stack runs in {self.run_dir}") from None
        self._lock_handle = handle

    def _sockets(self) -> Path:
        if socket_fits(self.config, self.run_dir):
            return self.run_dir
        self._socket_dir = Path(tempfile.mkdtemp(prefix="neoflex-"))
        return self._socket_dir

    def _release(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._socket_dir = None
        if self._lock_handle is not None:
            os.close(self._lock_handle)
            self._lock_handle = None


def _with_dumps(config: Config, run_dir: Path) -> Config:
    """Where services write their state, unless the configuration says otherwise."""
    if config.logging.dump_dir is not None:
        return config
    return config.model_copy(update={"logging": config.logging.model_copy(update={"dump_dir": run_dir})})


def _end(processes: list[SupervisedProcess], patience_s: float) -> None:
    """SIGTERM to all, SIGKILL to those that are still there when patience is over."""
    for process in processes:
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    for process in processes:
        if not process.join(max(0.0, deadline - time.monotonic())):
            process.signal(signal.SIGKILL)
            process.join(_EXIT_S)
