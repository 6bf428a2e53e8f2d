"""Kinds of values that sections share, and the section itself."""

import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

MAX_PORT = 65535
_SIZE = re.compile(r"\s*\d*\.?\d+\s*[a-zA-Z]*\s*")


def checked_address(address: str) -> str:
    """The address itself. Raises ValueError."""
    if re.fullmatch(r"unix:.+", address):
        return address
    match = re.fullmatch(r"(?:[^:]+|\[[0-9a-fA-F:.]+\]):(\d+)", address)
    if not match:
        raise ValueError(f'must be "host:port" or "unix:path", is {address!r}')
    if int(match[1]) > MAX_PORT:
        raise ValueError(f"the port must be from 0 to {MAX_PORT}, is {match[1]}")
    return address


def _checked_size(value: object) -> object:
    """pydantic takes True for 1 byte, and of "1,5GiB" no more than the 1."""
    if isinstance(value, bool) or (isinstance(value, str) and not _SIZE.fullmatch(value)):
        raise ValueError(no_size(value))
    return value


def no_size(value: object) -> str:
    """What to say of a value that is none."""
    return f"not a size such as 64MiB, is {value!r}"


def _checked_size_or_auto(value: object) -> object:
    """Whole, so that of a bad value one thing is said and not one for each kind."""
    if value == "auto":
        return value
    try:
        return _SIZES.validate_python(value)
    except ValidationError as error:
        item = error.errors()[0]
        limit = item["type"] == "less_than_equal"
        raise ValueError(item["msg"].replace("Input should", "must") if limit else no_size(value)) from error


Address = Annotated[str, AfterValidator(checked_address)]
Group = Annotated[str, Field(min_length=1)]
"""Name or number of a group of users."""
Size = Annotated[ByteSize, BeforeValidator(_checked_size), Field(le=2**63 - 1)]
_SIZES: TypeAdapter[ByteSize] = TypeAdapter(Size)
SizeOrAuto = Annotated[ByteSize | Literal["auto"], BeforeValidator(_checked_size_or_auto)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
