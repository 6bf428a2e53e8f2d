"""How rows are drawn, for tests."""

from typing import Any

import numpy as np

from gpu_svc.sampling import SamplingRows

_COLUMNS: dict[str, tuple[str, Any]] = {
    "temperature": ("f4", 0.0),
    "top_k": ("i4", 0),
    "top_p": ("f4", 1.0),
    "min_p": ("f4", 0.0),
    "seed": ("u8", 1),
    "draw": ("i8", 0),
    "num_logprobs": ("i4", -1),
}


def sampling_rows(num: int, **columns: Any) -> SamplingRows:
    """Columns may be scalars or sequences; greedy by default."""
    return SamplingRows(
        **{
            name: np.broadcast_to(np.array(columns.get(name, default), dtype), num).copy()
            for name, (dtype, default) in _COLUMNS.items()
        }
    )
