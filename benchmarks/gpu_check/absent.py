"""Stands in for modules that the executor imports and the check has no use for, and for what is not installed.

The check needs the repository, torch, numpy and a compiler; the services need more. So gRPC, grammars and the
configuration are never imported here, and a missing package takes only what really uses it with it.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_UNUSED = (
    "grpc",
    "llguidance",
    "neoflex.v1",
    "svc_common.config",
    "svc_common.grpc_server",
    "svc_common.security.tls",
    "svc_common.service_link",
)
_OPTIONAL = (
    "gguf",
    "safetensors",
    "zmq",
    "svc_common.cpu_kernels._kernels",
    "svc_common.tensor_plane._plane",
    "cpu_attn_svc._attention",
)
EXTENSION_MODULES = _OPTIONAL[3:]
EXTENSIONS = "C++ extensions"
_NAMES = {"zmq": "pyzmq"} | dict.fromkeys(EXTENSION_MODULES, EXTENSIONS)


class _Nothing(Exception):  # noqa: N818  # Most are no errors.
    """May be annotated with, made, raised and caught, and does nothing else."""

    def __init__(self, *args: Any, **_: Any) -> None:
        super().__init__(*args)

    def __class_getitem__(cls, _: Any) -> type:
        return cls


class _StandIn(ModuleType):
    """Has every name, and every module below it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Nothing,), {})
        setattr(self, name, made)
        return made


class _Below(MetaPathFinder, Loader):
    """Finds modules of packages that are stood in for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        inside = isinstance(sys.modules.get(name.rpartition(".")[0]), _StandIn)
        return ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It has all it needs."""


def install(without: Sequence[str] = ()) -> None:
    """Before the first import of a service. `without`: packages that count as not installed."""
    for name in without:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's own way to say that there is none.
    sys.meta_path.insert(0, _Below())
    for name in (*_UNUSED, *filter(_is_missing, _OPTIONAL)):
        sys.modules[name] = _StandIn(name)


def hide(name: str) -> None:
    """From now on it counts as not installed. For what has not been imported yet."""
    sys.modules[name] = None  # type: ignore[assignment]


def lacking(*modules: str) -> str:
    """Why these can't be had, or nothing."""
    names = dict.fromkeys(_NAMES.get(module, module) for module in modules if _is_missing(module))
    return f"no {', no '.join(names)}" if names else ""


def lacking_host_tier() -> str:
    """Why there is no attention on the CPU, or nothing."""
    return lacking("zmq", *EXTENSION_MODULES)


def _is_missing(name: str) -> bool:
    """Looks without importing anything but the packages that it is in."""
    if name in sys.modules:
        return sys.modules[name] is None or isinstance(sys.modules[name], _StandIn)
    package, _, leaf = name.rpartition(".")
    if not package:
        return find_spec(name) is None
    # Not by find_spec: an extension's package imports the extension.
    parent = find_spec(package)
    places = parent.submodule_search_locations if parent else None
    return PathFinder.find_spec(leaf, list(places or ())) is None
