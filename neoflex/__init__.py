"""NeoFlex: serves large language models on one GPU and the CPU beside it.

    with neoflex.Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=64).text)

Names load on first use: services import `neoflex.v1` through this package and shall not pay for the client.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neoflex.access import Tls as Tls
    from neoflex.aio import AsyncClient as AsyncClient
    from neoflex.aio import AsyncStream as AsyncStream
    from neoflex.client import Client as Client
    from neoflex.client import Stream as Stream
    from neoflex.errors import AccessError as AccessError
    from neoflex.errors import DeadlineExceededError as DeadlineExceededError
    from neoflex.errors import FieldViolation as FieldViolation
    from neoflex.errors import InvalidArgumentError as InvalidArgumentError
    from neoflex.errors import NeoflexError as NeoflexError
    from neoflex.errors import ResourceExhaustedError as ResourceExhaustedError
    from neoflex.errors import UnauthenticatedError as UnauthenticatedError
    from neoflex.errors import UnavailableError as UnavailableError
    from neoflex.generation import Completion as Completion
    from neoflex.generation import Delta as Delta
    from neoflex.generation import Finish as Finish
    from neoflex.generation import FinishReason as FinishReason
    from neoflex.generation import Message as Message
    from neoflex.generation import Usage as Usage
else:
    _MODULES = {
        "neoflex.access": ("Tls",),
        "neoflex.aio": ("AsyncClient", "AsyncStream"),
        "neoflex.client": ("Client", "Stream"),
        "neoflex.errors": (
            "AccessError",
            "DeadlineExceededError",
            "FieldViolation",
            "InvalidArgumentError",
            "NeoflexError",
            "ResourceExhaustedError",
            "UnauthenticatedError",
            "UnavailableError",
        ),
        "neoflex.generation": ("Completion", "Delta", "Finish", "FinishReason", "Message", "Usage"),
    }
    _HOME = {name: module for module, names in _MODULES.items() for name in names}

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
