"""The shape of the model that `neoflex plan` is asked about; no weights are needed."""

from planner_svc.advisor.errors import InputError
from svc_common.model.read_spec import read_spec
from svc_common.model.shapes import find_shape
from svc_common.model.spec import ModelSpec, UnsupportedModelError
from svc_common.model.store import ModelNotFoundError


def find_spec(name: str) -> ModelSpec:
    """Raises InputError."""
    try:
        return read_spec(find_shape(name))
    except ModelNotFoundError as error:
        raise InputError(f"--model: {error}") from error
    except UnsupportedModelError as error:
        raise InputError(f"--model: {name}: {error}") from error
