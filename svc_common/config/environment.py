"""Addresses from the environment: containers that read one file differ in where they listen and whom they reach.

`NEOFLEX_PLANNER_LISTEN` stands for `planner.listen`, and so on for every key that is `listen` or ends in `_listen`.
In the process that serves an address it is where that listens, in the others where they connect.
"""

from collections.abc import Mapping
from typing import get_args

from svc_common.config.root import Config
from svc_common.config.types import Section

_PREFIX = "NEOFLEX_"
_OF_CLIENTS = frozenset(
    f"{_PREFIX}{name}" for name in ("API_KEY", "CA_FILE", "CERTIFICATE_FILE", "KEY_FILE", "SERVER_NAME", "TLS")
)
"""What clients show a server, `neoflex` commands and health checks in a service's container among them."""


def address_names() -> dict[str, tuple[str, str]]:
    """By name of the variable the section and its key."""
    return {
        f"{_PREFIX}{section}_{key}".upper(): (section, key)
        for section, field in Config.model_fields.items()
        for key in _section(field.annotation).model_fields
        if key == "listen" or key.endswith("_listen")
    }


def with_addresses(
    values: Mapping[str, object], environ: Mapping[str, str]
) -> tuple[dict[str, object], dict[str, str]]:
    """A file's values with the environment's addresses over them, and by key which variable it has its value from.

    A variable of [cpu_attn] holds one address for each service, separated by commas, or one for all. Raises ValueError
    for a name that is none of `address_names` or of a client, and for another number of addresses.
    """
    names = address_names()
    given = {name: text for name, text in environ.items() if name.startswith(_PREFIX)}
    unknown = sorted(given.keys() - names.keys() - _OF_CLIENTS)
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: unknown; the environment may set {', '.join(sorted(names))}")
    merged = dict(values)
    origins: dict[str, str] = {}
    for name in given.keys() & names.keys():
        text, (section, key) = given[name], names[name]
        if section == "cpu_attn":
            merged[section] = services = _services(merged.get(section), key, name, text)
            origins |= {
                f"cpu_attn{f'[{index}]' if len(services) > 1 else ''}.{key}": name for index in range(len(services))
            }
        else:
            merged[section] = _over(merged.get(section), key, text)
            origins[f"{section}.{key}"] = name
    return merged, origins


def _section(annotation: object) -> type[Section]:
    """Of a field that is one, may be none, or is a tuple of them."""
    kinds = (annotation, *get_args(annotation))
    return next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section))


def _services(tables: object, key: str, name: str, text: str) -> list[object]:
    services = tables if isinstance(tables, list) else [tables]
    addresses = [part.strip() for part in text.split(",")]
    if len(addresses) == 1:
        addresses *= len(services)
    if len(addresses) != len(services):
        raise ValueError(f"{name}: {len(addresses)} addresses, one for each [[cpu_attn]] would be {len(services)}")
    return [_over(table, key, address) for table, address in zip(services, addresses, strict=True)]


def _over(table: object, key: str, text: str) -> object:
    """What is no table stays as it is: `parse` says what is wrong with it."""
    if table is None:
        return {key: text}
    return {**table, key: text} if isinstance(table, dict) else table
