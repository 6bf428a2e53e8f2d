"""The threads of this process's CPU kernels: one pool, as large as torch's."""

from functools import cache

import torch

from svc_common.cpu_kernels import ThreadPool


@cache
def cpu_threads() -> ThreadPool:
    return ThreadPool(torch.get_num_threads())
