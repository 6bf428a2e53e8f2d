"""Every file and directory that the configuration names: is it there, readable, and what it should be."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from neoflex.doctor.finding import Finding, Level
from svc_common.config import Config, ConfigError, GatewayConfig
from svc_common.model.shapes import find_model
from svc_common.model.store import BUILTIN_MODELS, ModelNotFoundError
from svc_common.security.api_keys import first_key
from svc_common.security.sockets import group_id
from svc_common.security.tls import TlsFiles

_TOPIC = "files"


def files(config: Config, root: Path) -> Iterator[Finding]:
    """What is wrong with them, or that all is well. `root` does not count: the services take paths as they are."""
    found = [*file_troubles(config)]
    yield from found
    if not found:
        yield Finding(Level.OK, _TOPIC, "all that the configuration names can be used")


def file_troubles(config: Config) -> Iterator[Finding]:
    """`advice` begins with the key that names the file."""
    for check in (_model, _template, _certificates, _telemetry, _dumps, _segments, _sockets, _groups):
        try:
            yield from check(config)
        except (ConfigError, ModelNotFoundError) as error:
            yield Finding(Level.PROBLEM, _TOPIC, "cannot be used", str(error))
    for name, path in _key_files(config):
        yield from _key(name, path)


def _problem(name: str, path: Path, text: str) -> Finding:
    return Finding(Level.PROBLEM, _TOPIC, str(path), f"{name}: {path}: {text}")


def _model(config: Config) -> Iterator[Finding]:
    """Only what is named by its path: where a built-in model or one of the hub's lies is not the file's affair."""
    source = config.model.source
    path = Path(source).expanduser()
    if source in BUILTIN_MODELS or not (source.startswith((".", "/", "~")) or path.exists()):
        return
    try:
        find_model(source, config.model.load_format)
    except ModelNotFoundError as error:
        raise ConfigError(f"model.source: {error}") from error
    except OSError as error:
        yield _problem("model.source", path, error.strerror or str(error))


def _template(config: Config) -> Iterator[Finding]:
    if path := config.model.chat_template:
        yield from _readable("model.chat_template", path, _is_text)


def _certificates(config: Config) -> Iterator[Finding]:
    """Each pair by itself, so that one which is wrong hides no other."""
    try:
        TlsFiles.of(config.tls)
    except ConfigError as error:
        yield Finding(Level.PROBLEM, _TOPIC, "a certificate or key cannot be used", str(error))
    gateway = config.gateway
    if gateway and gateway.certificate and gateway.key:
        TlsFiles.of_pair("gateway", gateway.certificate, gateway.key, None)


def _telemetry(config: Config) -> Iterator[Finding]:
    telemetry = config.telemetry
    for key in ("certificate", "client_certificate", "client_key"):
        if path := getattr(telemetry, key):
            yield from _readable(f"telemetry.{key}", path, _is_pem)
    if telemetry.client_key:
        yield from _private("telemetry.client_key", telemetry.client_key)


def _dumps(config: Config) -> Iterator[Finding]:
    if path := config.logging.dump_dir:
        yield from _directory("logging.dump_dir", path)


def _segments(config: Config) -> Iterator[Finding]:
    for index, service in enumerate(config.cpu_attn):
        if service.kv_bytes:
            yield from _directory(f"{config.cpu_attn_key(index)}.segment_dir", service.segment_dir)


def _sockets(config: Config) -> Iterator[Finding]:
    """Their directories; the sockets are made at start."""
    addresses = [("planner.listen", config.planner.listen), ("gpu.listen", config.gpu.listen)]
    addresses += [(f"{config.cpu_attn_key(i)}.listen", service.listen) for i, service in enumerate(config.cpu_attn)]
    if config.gateway:
        addresses.append(("gateway.listen", config.gateway.listen))
    for name, address in addresses:
        if address.startswith("unix:"):
            yield from _directory(name, Path(address.removeprefix("unix:")).absolute().parent)


def _groups(config: Config) -> Iterator[Finding]:
    gateway = config.gateway or GatewayConfig()
    groups = [(f"{key}.socket_group", getattr(config, key).socket_group) for key in ("planner", "gpu")]
    groups.append(("gateway.socket_group", gateway.socket_group))
    for index, service in enumerate(config.cpu_attn):
        key = config.cpu_attn_key(index)
        groups += [(f"{key}.socket_group", service.socket_group), (f"{key}.segment_group", service.segment_group)]
    for name, group in groups:
        if group is not None:
            try:
                group_id(name, group)
            except ConfigError as error:
                yield Finding(Level.PROBLEM, _TOPIC, group, str(error))


def _key_files(config: Config) -> Iterator[tuple[str, Path]]:
    gateway = config.gateway or GatewayConfig()
    named = (
        ("planner.api_keys_file", config.planner.api_keys_file),
        ("gateway.api_keys_file", gateway.api_keys_file),
        ("gateway.planner_key_file", gateway.planner_key_file),
    )
    yield from ((name, path) for name, path in named if path is not None)


def _key(name: str, path: Path) -> Iterator[Finding]:
    try:
        first_key(name, path)
    except ConfigError as error:
        yield Finding(Level.PROBLEM, _TOPIC, str(path), str(error))
    else:
        yield from _private(name, path)


def _private(name: str, path: Path) -> Iterator[Finding]:
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # Said already.
    if mode & stat.S_IROTH:
        advice = f"{name}: {path}: everybody on this machine may read it: chmod 600 {path}"
        yield Finding(Level.NOTE, _TOPIC, str(path), advice)


def _readable(name: str, path: Path, complaint: Callable[[bytes], str]) -> Iterator[Finding]:
    try:
        content = path.read_bytes()
    except OSError as error:
        yield _problem(name, path, error.strerror or str(error))
    else:
        if text := complaint(content):
            yield _problem(name, path, text)


def _is_text(content: bytes) -> str:
    try:
        content.decode()
    except UnicodeDecodeError:
        return "is no text in UTF-8"
    return ""


def _is_pem(content: bytes) -> str:
    return "" if b"-----BEGIN " in content else "is no PEM file"


def _directory(name: str, path: Path) -> Iterator[Finding]:
    if not path.exists():
        yield _problem(name, path, "there is no such directory")
    elif not path.is_dir():
        yield _problem(name, path, "is no directory")
    elif not os.access(path, os.W_OK | os.X_OK):
        yield _problem(name, path, "cannot be written to")
