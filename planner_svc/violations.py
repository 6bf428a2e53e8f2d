"""Collects what is wrong with one request, so that all of it is said at once."""

from svc_common.errors import FieldViolation, invalid_arguments


class Violations:
    """Of one request."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def require(self, holds: bool, field: str, description: str) -> None:
        """Notes a violation unless it holds."""
        if not holds:
            self._found.append(FieldViolation(field, description))

    def raise_any(self) -> None:
        """Raises ServiceError where there is any."""
        if self._found:
            raise invalid_arguments(tuple(self._found))
