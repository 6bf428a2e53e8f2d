"""Finds the C++ extensions or builds them: a tree of links beside them, so that the checkout stays as it is.

python build.py CHECKOUT DIRECTORY      prints where to import the packages from
"""

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

EXTENSIONS = {
    "_plane": "svc_common/tensor_plane",
    "_kernels": "svc_common/cpu_kernels",
    "_attention": "cpu_attn_svc",
}
_PACKAGES = ("neoflex", "svc_common", "planner_svc", "gpu_svc", "cpu_attn_svc")


class CannotBuildError(Exception):
    """The text says what is missing."""


def built_in(tree: Path) -> bool:
    """Whether all extensions lie there for this Python."""
    return all(_find(tree / package, name) for name, package in EXTENSIONS.items())


def _find(directory: Path, name: str) -> bool:
    # Not as built for any Python 3: what lies there may be another processor's.
    return (directory / f"{name}{EXTENSION_SUFFIXES[0]}").exists()


def prepare(checkout: Path, directory: Path) -> Path:
    """The checkout itself, or a tree below `directory`. Raises CannotBuildError, after which the checkout will do."""
    if built_in(checkout):
        return checkout
    tree = directory / "tree"
    _compile(checkout, directory / "cmake")
    shutil.rmtree(tree, ignore_errors=True)
    for package in _PACKAGES:
        shutil.copytree(checkout / package, tree / package, copy_function=os.symlink, ignore=_ignored)
    for name, package in EXTENSIONS.items():
        (built,) = (directory / "cmake").rglob(f"{name}{EXTENSION_SUFFIXES[0]}")
        target = tree / package / built.name
        target.unlink(missing_ok=True)
        shutil.copy(built, target)
    return tree


def _ignored(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name in ("__pycache__", "csrc")]


def _compile(checkout: Path, directory: Path) -> None:
    if find_spec("nanobind") is None:
        raise CannotBuildError("nanobind is not installed")
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    if cmake is None:
        raise CannotBuildError("there is no cmake")
    nanobind = subprocess.run(
        [sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    configure = [cmake, *generator, "-S", str(checkout), "-B", str(directory), f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-Dnanobind_DIR={nanobind}", "-DCMAKE_BUILD_TYPE=Release"]
    compile_all = [cmake, "--build", str(directory), "--parallel", str(os.cpu_count() or 1), "--target", *EXTENSIONS]
    directory.mkdir(parents=True, exist_ok=True)
    print("building the C++ extensions; this takes a minute or two", file=sys.stderr, flush=True)
    log = directory / "build.log"
    with log.open("w") as output:
        for command in (configure, compile_all):
            if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode:
                raise CannotBuildError(f"{_first_error(log)}; all of it is in {log}")


def _first_error(log: Path) -> str:
    """The line that says so and, as CMake's own begin with a place, two more."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    first = next((number for number, line in enumerate(lines) if "error" in line.lower()), len(lines) - 3)
    return " ".join(lines[max(first, 0) :][:3])[:300] or "cmake said nothing"


def main() -> None:
    checkout, directory = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        print(prepare(checkout, directory))
    except (CannotBuildError, OSError, subprocess.SubprocessError) as error:
        print(f"no C++ extensions: {error}", file=sys.stderr)
        print(checkout)


if __name__ == "__main__":
    main()
