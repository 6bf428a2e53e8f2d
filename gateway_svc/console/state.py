"""The planner's figures of this moment as the console takes them."""

from itertools import zip_longest
from typing import Any

from gateway_svc.planner import Model
from neoflex.v1 import inference_pb2 as pb


def state(model: Model, info: pb.GetServerInfoResponse, load: pb.GetLoadResponse) -> dict[str, Any]:
    """Counters are totals since the planner started; the page takes differences over `uptime_s`."""
    done = info.counters
    return {
        "model": {"name": model.name, "context_tokens": model.context_tokens},
        "version": info.version,
        "device": info.device,
        "uptime_s": info.uptime_s,
        "requests": {
            "running": load.running_requests,
            "waiting": load.waiting_requests,
            "max_waiting": load.max_waiting_requests,
        },
        "gpu": {"used": load.gpu_blocks_used, "total": load.gpu_blocks_total, "block_bytes": info.block_bytes},
        "pools": _pools(info, load),
        "block_tokens": info.block_tokens,
        "classes": _classes(info, load),
        "counters": {
            "generated_tokens": done.generated_tokens,
            "prefilled_tokens": done.prefilled_tokens,
            "cached_tokens": done.cached_tokens,
            "executor_busy_s": done.executor_busy_ns / 1e9,
            "cpu_wait_s": done.cpu_wait_ns / 1e9,
            "cpu_attention_s": done.cpu_attention_ns / 1e9,
        },
        "iterations": {
            "gpu_only": done.gpu_only_iterations,
            "asymmetric": done.asymmetric_iterations,
            "same_layer": done.same_layer_iterations,
            "decoupled": done.decoupled_iterations,
        },
    }


def _pools(info: pb.GetServerInfoResponse, load: pb.GetLoadResponse) -> list[dict[str, Any]]:
    """The two calls may see an epoch begin between them: what the second has not is 0."""
    used = load.host_pool_blocks_used[: len(info.host_pools)]
    return [
        {
            "used": used_blocks,
            "total": pool.num_blocks,
            "block_bytes": info.host_block_bytes,
            "threads": pool.num_threads,
            "min_threads": pool.min_threads,
            "max_threads": pool.max_threads,
            "error": pool.error,
        }
        for pool, used_blocks in zip_longest(info.host_pools, used, fillvalue=0)
        if isinstance(pool, pb.HostPoolInfo)
    ]


def _classes(info: pb.GetServerInfoResponse, load: pb.GetLoadResponse) -> list[dict[str, Any]]:
    loads = {item.name: item for item in load.classes}
    return [
        {
            "name": item.name,
            "is_default": item.is_default,
            "ttft_ms": item.targets.ttft.ToNanoseconds() / 1e6 if item.HasField("targets") else None,
            "tpot_ms": item.targets.tpot.ToNanoseconds() / 1e6 if item.HasField("targets") else None,
            "waiting": loads[item.name].waiting_requests if item.name in loads else 0,
            "running": loads[item.name].running_requests if item.name in loads else 0,
            "in_time": item.requests_in_time,
            "late": item.requests_late,
            "refused": item.requests_refused,
        }
        for item in info.service_classes
    ]
