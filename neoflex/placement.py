"""Where a LocalStack's services listen, and the TOML file that tells them."""

import errno
import json
import os
import socket
from pathlib import Path
from types import NoneType

from svc_common.config import MAX_PORT, Config, GatewayConfig, TlsConfig
from svc_common.security.tls import TlsFiles

_CONNECT_S = 1.0
_MAX_SOCKET_PATH_BYTES = 107  # sun_path of unix(7), less the final zero.


class AddressInUseError(Exception):
    """A service cannot listen where it should, mostly because somebody else already does."""


def cpu_attn_suffix(config: Config, index: int) -> str:
    """What tells one service of attention from the others, where there are several."""
    return f"-{index}" if len(config.cpu_attn) > 1 else ""


def socket_fits(config: Config, directory: Path) -> bool:
    """Whether sockets in this directory have a path that the kernel accepts."""
    last = f"cpu_attn{cpu_attn_suffix(config, len(config.cpu_attn) - 1)}.sock"
    return len(os.fsencode(directory / last)) <= _MAX_SOCKET_PATH_BYTES


def shared_address(config: Config) -> str | None:
    """Says which two of the services of this configuration would listen at one address; None where none would."""
    named: dict[str, str | None] = {
        "planner.listen": config.planner.listen,
        "planner.metrics_listen": config.planner.metrics_listen,
        "gpu.listen": config.gpu.listen,
        "gpu.metrics_listen": config.gpu.metrics_listen,
    }
    for index, service in enumerate(config.cpu_attn):
        key = config.cpu_attn_key(index)
        named |= {f"{key}.listen": service.listen, f"{key}.metrics_listen": service.metrics_listen}
    if config.gateway:
        named["gateway.listen"] = config.gateway.listen
    keys: dict[str, str] = {}
    for key, address in named.items():
        if address is None or address.endswith(":0"):
            continue
        if address in keys:
            return f"{keys[address]} and {key} are both {address}: each needs its own"
        keys[address] = key
    return None


def place(config: Config, socket_dir: Path) -> Config:
    """Puts the inner services on private Unix sockets, and planner and gateway on a free port where the port is 0.

    An inner address that the configuration names itself is kept. So is the gateway's; where it names none, a free port
    stands in for one that is taken. Raises AddressInUseError, and ConfigError where [tls] can't be used.
    """
    gpu = config.gpu
    if "listen" not in gpu.model_fields_set:
        gpu = gpu.model_copy(update={"listen": f"unix:{socket_dir / 'gpu.sock'}"})
    cpu_attn = tuple(
        service
        if "listen" in service.model_fields_set
        else service.model_copy(
            update={"listen": f"unix:{socket_dir / f'cpu_attn{cpu_attn_suffix(config, index)}.sock'}"}
        )
        for index, service in enumerate(config.cpu_attn)
    )
    planner = config.planner.model_copy(update={"listen": _bindable(config.planner.listen, "--port 0")})
    gateway = _placed_gateway(config.gateway) if config.gateway else None
    tls = _placed_tls(config.tls) if config.tls else None
    placed = config.model_copy(
        update={"planner": planner, "gpu": gpu, "cpu_attn": cpu_attn, "gateway": gateway, "tls": tls}
    )
    if complaint := shared_address(placed):
        raise AddressInUseError(complaint)
    return placed


def _placed_tls(tls: TlsConfig) -> TlsConfig:
    """All services have one certificate here, so it is known for which name it is, and it can be trusted as it is."""
    files = TlsFiles.of(tls)
    names = files.identity().names if files else ()
    name = names[0].replace("*", "planner") if names else None
    return tls.model_copy(update={"server_name": tls.server_name or name, "ca": tls.ca or tls.certificate})


def _placed_gateway(gateway: GatewayConfig) -> GatewayConfig:
    try:
        listen = _bindable(gateway.listen, "--http 127.0.0.1:0")
    except AddressInUseError:
        if "listen" in gateway.model_fields_set:
            raise
        listen = _bindable(f"{gateway.listen.rpartition(':')[0]}:0", "")
    return gateway.model_copy(update={"listen": listen})


def _bindable(listen: str, free: str) -> str:
    """The address with a real port. Tried out here: a foreign server must not be taken for ours once it answers.

    `free`: the option by which `neoflex up` takes a free port.
    """
    if listen.startswith("unix:"):
        return listen
    host, _, port = listen.rpartition(":")
    bare_host = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare_host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bare_host, int(port)))
        except OSError as error:
            # The number in front of the words tells a user nothing.
            raise AddressInUseError(
                f"cannot listen on {listen}: {error.strerror or error}{_advice(error, free)}"
            ) from error
        except (OverflowError, ValueError) as error:
            raise AddressInUseError(f"cannot listen on {listen}: the port must be from 0 to {MAX_PORT}") from error
        return f"{host}:{probe.getsockname()[1]}"


def _advice(error: OSError, free: str) -> str:
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        return f"; choose another port, or a free one with: neoflex up {free}"
    return ""


def accepts(listen: str) -> bool:
    """Whether somebody accepts connections there now."""
    try:
        if listen.startswith("unix:"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(_CONNECT_S)
                probe.connect(listen.removeprefix("unix:"))
        else:
            host, _, port = listen.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError:
        return False
    return True


def to_toml(config: Config) -> str:
    """The whole configuration, defaults included, as `svc_common.config.load` reads it."""
    values = config.model_dump()
    services = values.pop("cpu_attn")
    header = "[cpu_attn]" if len(services) == 1 else "[[cpu_attn]]"
    tables = _tables("", values) + ["\n".join([header, *_lines(service)]) for service in services]
    return "\n\n".join(tables) + "\n"


def _tables(path: str, values: dict[str, object]) -> list[str]:
    """A table and those inside it; names are of characters that need no quotes."""
    lines = _lines(values)
    inner = [(f"{path}.{key}" if path else key, value) for key, value in values.items() if isinstance(value, dict)]
    own = ["\n".join([f"[{path}]", *lines])] if path and (lines or not inner) else []
    return own + [table for inner_path, value in inner for table in _tables(inner_path, value)]


def _lines(values: dict[str, object]) -> list[str]:
    return [f"{key} = {_toml_value(value)}" for key, value in values.items() if not isinstance(value, dict | NoneType)]


def _toml_value(value: object) -> str:
    if isinstance(value, str | Path):
        # A JSON string is a TOML basic string, but for DEL, which only JSON takes as it is.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(int(value) if isinstance(value, int) else value)  # ByteSize is an int that prints as itself.
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    raise TypeError(f"no TOML for {value!r}")
