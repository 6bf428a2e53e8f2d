"""Measured tables from one start to the next: used where all is as it was, measured again where anything is not."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.gpu import BLOCK_TOKENS, LIMITS, load_decoder

from gpu_svc.executor import Executor
from gpu_svc.kv_cache import KvShape
from gpu_svc.limits import Limits
from gpu_svc.profiler import Profiler
from gpu_svc.table_cache import TableCache, digest
from gpu_svc.tables import Tables
from svc_common.model.store import ModelFiles

FACTS = {"model": {"layers": 3}, "threads": 2, "limits": (1, 2)}
TABLES = Tables(
    linear=((1, 0.1), (8, 0.30000000000000004)),
    prefill=((4, 0, 0.5), (4, 16, 0.6)),
    gpu_decode=((1, 16, 0.25),),
    cpu_decode=((1, 16, 0.75),),
    head=((1, 1.5),),
    swap_bytes_per_s=1e9,
    iteration_s=1e-3,
    cpu_copy=((1, 2e-6),),
    cpu_signal_s=3e-6,
    cpu_pool_factors=(1.0, 1.5),
)


@pytest.fixture
def cache(tmp_path: Path) -> TableCache:
    return TableCache(tmp_path / "cache" / "profiles", {"processor": "one"})


def only_file(directory: Path) -> Path:
    [path] = (directory / "cache" / "profiles").iterdir()
    return path


def test_what_was_stored_comes_back(cache: TableCache, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert cache.load(FACTS) is None
    assert not caplog.records
    cache.store(FACTS, TABLES)
    with caplog.at_level(logging.INFO):
        assert cache.load(FACTS) == TABLES
    [message] = caplog.messages
    assert re.fullmatch(
        rf"operations were measured 0:\d\d:\d\d ago, see {re.escape(str(only_file(tmp_path)))}", message
    )


@pytest.mark.parametrize("change", [{"threads": 1}, {"model": {"layers": 4}}, {"limits": (1, 3)}, {"more": 0}])
def test_other_facts_are_another_file(cache: TableCache, change: dict[str, object]) -> None:
    cache.store(FACTS, TABLES)
    assert cache.load({**FACTS, **change}) is None


def test_another_machine_is_another_file(cache: TableCache, tmp_path: Path) -> None:
    cache.store(FACTS, TABLES)
    assert TableCache(tmp_path / "cache" / "profiles", {"processor": "two"}).load(FACTS) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: "",
        lambda document: "[]",
        lambda document: "[" * 100_000,
        lambda document: json.dumps(document)[:-40],
        lambda document: json.dumps({**document, "format": 0}),
        lambda document: json.dumps({**document, "facts": {}}),
        lambda document: json.dumps({**document, "measured_at": "yesterday"}),
        lambda document: json.dumps({**document, "tables": {**document["tables"], "linear": []}}),
        lambda document: json.dumps({**document, "tables": {**document["tables"], "iteration_s": -1.0}}),
        lambda document: json.dumps({**document, "tables": {**document["tables"], "iteration_s": "NaN"}}),
        lambda document: json.dumps({**document, "tables": {**document["tables"], "iteration_s": 10**400}}),
        lambda document: json.dumps({**document, "tables": {**document["tables"], "prefill": [{"seconds": 1.0}]}}),
        lambda document: json.dumps({**document, "tables": {**document["tables"], "else": 1}}),
    ],
)
def test_a_file_that_is_spoilt_is_said_and_overwritten(
    cache: TableCache, tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[dict[str, object]], str]
) -> None:
    cache.store(FACTS, TABLES)
    path = only_file(tmp_path)
    path.write_text(spoil(json.loads(path.read_text())))
    assert cache.load(FACTS) is None
    assert caplog.messages[0].startswith(f"{path} is not used and will be overwritten: ")
    cache.store(FACTS, TABLES)
    assert cache.load(FACTS) == TABLES


def test_a_directory_that_cannot_be_written_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    cache = TableCache(tmp_path / "file" / "profiles", {})
    cache.store(FACTS, TABLES)
    assert cache.load(FACTS) is None
    assert caplog.messages[0].startswith("measured operations are not kept: ")


def test_builds_are_told_apart(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"1")
    second.write_bytes(b"2")
    before = digest([first, second])
    assert digest([second, first]) == before
    second.write_bytes(b"3")
    assert digest([first, second]) != before


def test_an_executor_measures_once(
    cache: TableCache, checkpoint: Callable[[str], ModelFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_decoder(checkpoint("llama"))
    shape = KvShape.of(decoder.spec, BLOCK_TOKENS, decoder.dtype)
    measured: list[Limits] = []

    def measure(profiler: Profiler) -> Tables:
        measured.append(profiler.limits)
        return TABLES

    monkeypatch.setattr(Profiler, "measure", measure)

    def profile(limits: Limits, table_cache: TableCache | None) -> Tables:
        executor = Executor(decoder, shape, 10 * shape.block_bytes, table_cache)
        executor.open_epoch(1, limits, None)
        return executor.profile()

    wider = replace(LIMITS, max_batch_tokens=LIMITS.max_batch_tokens + 1)
    assert [profile(limits, cache) for limits in (LIMITS, LIMITS, wider, LIMITS)] == 4 * [TABLES]
    assert measured == [LIMITS, wider]
    profile(LIMITS, None)
    assert measured == [LIMITS, wider, LIMITS]
