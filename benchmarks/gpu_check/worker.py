"""`python -m gpu_check.worker JSON`: a cpu_attn_svc without its gRPC; regions are asked for by a line of JSON each.

Session, segment and threads are the service's own. Ends when its standard input does.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from gpu_check import absent


def main() -> None:
    options = json.loads(sys.argv[1])
    absent.install(options["without"])
    from cpu_attn_svc.session import RegionSession
    from cpu_attn_svc.totals import Totals
    from svc_common.cores import CpuClaim, pinnable_cpus
    from svc_common.cpu_kernels import ThreadPool, choose_instruction_set
    from svc_common.tensor_plane import RegionShape, Segment

    claim = CpuClaim(pinnable_cpus(from_end=True), options["num_threads"])
    threads, instruction_set = ThreadPool(options["num_threads"], claim.cpus), choose_instruction_set("auto")
    session: RegionSession | None = None

    def open_region(wanted: dict[str, Any]) -> dict[str, str]:
        """Closes the one before."""
        nonlocal session
        shape = RegionShape(**wanted["shape"] | {"sliding_windows": tuple(wanted["shape"]["sliding_windows"])})
        if session is not None:
            session.close()
        layers = _layers(wanted, shape.num_cpu_layers, threads) if shape.num_cpu_layers else None
        segment = Segment.create(Path(options["directory"]), wanted["epoch"], shape, wanted["kv_bytes"], claim.cpus)
        session = RegionSession(segment, instruction_set, threads, Totals(), layers)
        session.start()
        return {"path": segment.path, "endpoint": segment.endpoint, "instruction_set": instruction_set}

    for line in sys.stdin:
        try:
            answer = open_region(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    if session is not None:
        session.close()


def _layers(wanted: dict[str, Any], num_layers: int, threads: Any) -> Any:
    from cpu_attn_svc.host import WantedLayers
    from cpu_attn_svc.layers import CpuLayers

    layers = WantedLayers(wanted["weight_dtype"], wanted["digest"])
    return CpuLayers.load(wanted["model"], "dummy", num_layers, layers, threads)


if __name__ == "__main__":
    main()
