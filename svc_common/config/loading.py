"""From a file, and from a service's command line."""

import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from svc_common.config.environment import with_addresses
from svc_common.config.root import Config, check_apart
from svc_common.config.types import no_size


class ConfigError(Exception):
    """The configuration cannot be used. The text names the key and the limit."""


def load(path: Path, environ: Mapping[str, str] = MappingProxyType({})) -> Config:
    """Reads a TOML file; addresses of `environ` go over it, see environment.py. Raises ConfigError naming each bad key
    or variable.
    """
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # Bytes that are no UTF-8 included.
        raise ConfigError(f"{path}: not TOML: {error}") from error
    try:
        values, variables = with_addresses(values, environ)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    config = parse(values, str(path), variables)
    try:
        check_apart([service.listen for service in config.cpu_attn])
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return config


def parse(values: dict[str, object], origin: str, typed: Mapping[str, str] = MappingProxyType({})) -> Config:
    """Checks values as read from TOML. Raises ConfigError naming each bad key.

    `typed`: how the user wrote a key that does not come from `origin`, e.g. {"planner.mode": "--mode"}.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        ours, theirs = [], []
        for item in error.errors():
            key = _key(item["loc"], has_several=_num_cpu_attn(values) > 1)
            if key in typed:
                ours.append(f"{typed[key]}: {_complaint(item)}")
            else:
                theirs.append(f"{key}: {_complaint(item)}" if key else _complaint(item))
        from_origin = [f"{origin}: {'; '.join(theirs)}"] if theirs else []
        raise ConfigError("; ".join(ours + from_origin)) from error


def _num_cpu_attn(values: Mapping[str, object]) -> int:
    services = values.get("cpu_attn")
    return len(services) if isinstance(services, list) else 1


def _key(place: tuple[int | str, ...], has_several: bool) -> str:
    """As the user knows it: a single service is no list."""
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    return key if has_several else key.replace("cpu_attn[0]", "cpu_attn", 1)


def _complaint(item: ErrorDetails) -> str:
    """What pydantic found, in words for somebody who does not know pydantic."""
    value = item["input"]
    match item["type"]:
        case "extra_forbidden":
            return "unknown key"
        case "missing":
            return "is missing"
        case "string_too_short" if value == "":
            return "must not be empty"
        case "model_type" | "dict_type":
            return f"must be a table of keys, is {value!r}"
        case "byte_size" | "byte_size_unit":
            return no_size(value)
        case "value_error":  # One of ours.
            return item["msg"].removeprefix("Value error, ")
        case _:
            return f"{item['msg'].replace('Input should be', 'must be', 1)}, is {value!r}"


def load_from_argv(service: str) -> Config:
    """The file named on a service's command line; prints what is wrong and exits with 2 otherwise."""
    if len(sys.argv) != 3 or sys.argv[1] != "--config":
        print(f"usage: python -m {service} --config FILE.toml", file=sys.stderr)
        raise SystemExit(2)
    return _load_or_exit(service, sys.argv[2])


def load_cpu_attn_from_argv(service: str) -> tuple[Config, int]:
    """And which of `Config.cpu_attn` this process is; exits as `load_from_argv`."""
    arguments = sys.argv[1:]
    has_index = len(arguments) == 4 and arguments[2] == "--index" and arguments[3].isdecimal()
    if not arguments or arguments[0] != "--config" or not (len(arguments) == 2 or has_index):
        print(f"usage: python -m {service} --config FILE.toml [--index NUMBER]", file=sys.stderr)
        raise SystemExit(2)
    config = _load_or_exit(service, arguments[1])
    index = int(arguments[3]) if has_index else 0
    if index >= len(config.cpu_attn):
        print(f"{service}: --index must be from 0 to {len(config.cpu_attn) - 1}, is {index}", file=sys.stderr)
        raise SystemExit(2)
    return config, index


def _load_or_exit(service: str, path: str) -> Config:
    try:
        return load(Path(path), os.environ)
    except ConfigError as error:
        print(f"{service}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
