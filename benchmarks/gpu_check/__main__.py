"""`python -m gpu_check`, as gpu_check.sh calls it: runs the stages, prints the table, writes the JSON.

Exit status: 0; 1 where a check failed; 2 where nothing could be run.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_check import absent

_BUDGET_S, _TINY_BUDGET_S = 300.0, 3.0
_LOG_LINES = 500
COSTS = {
    "triton": "torch's own operations instead of the kernels",
    "zmq": "no attention on the CPU: GPU-only is all that runs",
    "nanobind": "needed to build the C++ extensions, where they are not built",
    "pydantic": "streamed and CPU layers are not checked",
    "transformers": "no tokens to compare with and no peer",
    "cuda.bindings": "doorbells are rung by a thread of the host, not by the stream",
    "flashinfer": "attention is Triton's in any case",
}
_DISTRIBUTIONS = {"zmq": "pyzmq", "cuda.bindings": "cuda-bindings", "flashinfer": "flashinfer-python"}
_PRELOADED = ("tokens", "policies", "kernels", "reference", "launches", "loads", "serving", "peer", "machine")
_PEER = "transformers.models.llama.modeling_llama"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Proves and measures the executor on a GPU.")
    parser.add_argument("--checkout", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="all of it, with models and loads for a CPU")
    parser.add_argument("--budget-s", type=float, help="what all should take, after starting; default 300")
    parser.add_argument("--without", action="append", default=[], metavar="PACKAGE", help="as if it were not installed")
    parser.add_argument("--stages", type=lambda text: text.split(","), help="some of them, by the beginnings of names")
    args = parser.parse_args()
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu needs --tiny: all other models and loads are for a GPU")
    if args.budget_s is not None and args.budget_s <= 0:
        parser.error(f"--budget-s must be above 0, is {args.budget_s:g}")
    return args


def packages() -> dict[str, str]:
    """Versions by import name, of all that the check can use; empty where there is none."""
    names = ("torch", "numpy", *COSTS)
    return {name: "" if absent.lacking(name) else _version(_DISTRIBUTIONS.get(name, name)) for name in names}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "some"


def commit(checkout: Path) -> str:
    git = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=10"]
    with suppress(OSError):
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return "unknown"


def _log_end(path: Path) -> list[str]:
    """So that the JSON alone tells why something broke."""
    return path.read_text(errors="replace").splitlines()[-_LOG_LINES:] if path.exists() else []


def _preload(args: argparse.Namespace) -> None:
    """Once for all stages; what can't be imported says so in its stage."""
    modules = [f"gpu_check.{module}" for module in _PRELOADED]
    if args.device == "cpu" and args.stages is None:  # It might look for a GPU, which only a forked process may do.
        modules.append(_PEER)
    for module in modules:
        with suppress(Exception):
            import_module(module)


def main() -> None:
    args = arguments()
    if args.tiny and args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # Read when Triton is imported.
    absent.install(args.without)
    found = packages()
    missing = {name: cost for name, cost in COSTS.items() if not found[name]}
    print(", ".join(f"{name} {number}" for name, number in found.items() if number))
    for name, cost in missing.items():
        print(f"not installed: {_DISTRIBUTIONS.get(name, name)}: {cost}")
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    from gpu_check.rows import Status, table
    from gpu_check.setting import Setting
    from gpu_check.stages import NO_DEVICE, STAGES, run_all

    _preload(args)
    out = Path(os.environ["OUT"])
    for old in ("gpu_check.json", "gpu_check.txt", "gpu_check.log"):
        (out / old).unlink(missing_ok=True)
    budget_s = args.budget_s or (_TINY_BUDGET_S if args.tiny else _BUDGET_S)
    chosen = [s for s in STAGES if args.stages is None or any(s.name.startswith(name) for name in args.stages)]
    if not chosen:
        print(f"--stages: there are {', '.join(stage.name for stage in STAGES)}", file=sys.stderr)
        sys.exit(2)
    scratch = Path(tempfile.mkdtemp(prefix="nfx-"))
    started_s = time.monotonic()
    try:
        rows = run_all(Setting(args.device, args.tiny, 0.0, out, scratch, tuple(args.without)), chosen, budget_s)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if any(row.detail.endswith(NO_DEVICE) for row in rows):
        print(f"{NO_DEVICE}; --device cpu --tiny runs all of it, small, on the CPU", file=sys.stderr)
        sys.exit(2)
    document: dict[str, Any] = {
        "format": 1,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(args.checkout),
        "machine": {row.what: row.detail for row in rows if row.stage == "machine"},
        "device": args.device,
        "tiny": args.tiny,
        "took_s": round(time.monotonic() - started_s, 1),
        "packages": found,
        "missing": missing,
        "rows": [asdict(row) for row in rows],
        "log": _log_end(out / "gpu_check.log"),
    }
    (out / "gpu_check.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "gpu_check.txt").write_text(table(rows) + "\n")
    print(table(rows))
    num = {status: sum(row.status is status for row in rows) for status in Status}
    print(f"\n{', '.join(f'{count} {status.value}' for status, count in num.items() if count)}")
    print(f"{document['took_s']} s; {out / 'gpu_check.json'}")
    sys.exit(1 if num[Status.FAIL] else 0)


if __name__ == "__main__":
    main()
