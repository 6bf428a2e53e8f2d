"""`neoflex config` as a user meets it."""

import tomllib
from pathlib import Path

from support.command import Run

from svc_common.config import Config, parse
from svc_common.config.reference import reference


def test_check_says_that_a_file_is_fine(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('[gpu]\nkv_bytes = "64MiB"\n')
    ended = run("config", "check", str(file))
    assert (ended.code, ended.out, ended.err) == (0, f"{file}: fine\n", "")


def test_check_names_each_bad_key(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('[gpu]\nkv = 1\nnum_threads = -1\n[planner]\nlisten = "50051"\n')
    ended = run("config", "check", str(file))
    assert (ended.code, ended.out) == (1, "")
    for complaint in ("gpu.kv: unknown key", "gpu.num_threads: must be", "planner.listen: must be"):
        assert complaint in ended.err


def test_check_looks_at_the_files_that_one_names(run: Run, tmp_path: Path) -> None:
    file, keys = tmp_path / "server.toml", tmp_path / "keys"
    keys.write_text("key")
    keys.chmod(0o644)
    file.write_text(f'[planner]\napi_keys_file = "{keys}"\n')
    ended = run("config", "check", str(file))
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == (
        f"{file}: planner.api_keys_file: {keys}: everybody on this machine may read it: chmod 600 {keys}\n"
    )
    file.write_text('[logging]\ndump_dir = "/nowhere"\n')
    ended = run("config", "check", str(file))
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == f"{file}: logging.dump_dir: /nowhere: there is no such directory\n"


def test_check_of_no_file(run: Run, tmp_path: Path) -> None:
    ended = run("config", "check", str(tmp_path / "none.toml"))
    assert (ended.code, ended.err) == (1, f"error: {tmp_path}/none.toml: No such file or directory\n")


def test_show_prints_all_defaults(run: Run, tmp_path: Path) -> None:
    assert parse(tomllib.loads(run("config", "show").out), "shown") == Config()
    file = tmp_path / "server.toml"
    file.write_text('[gpu]\nkv_bytes = "64MiB"\n[planner.classes.default]\nttft_s = 1\ntpot_s = 0.1\n')
    shown = parse(tomllib.loads(run("config", "show", str(file)).out), "shown")
    assert shown.gpu.kv_bytes == 64 * 2**20
    assert shown.planner.classes["default"].tpot_s == 0.1


def test_reference_is_the_page(run: Run) -> None:
    assert run("config", "reference").out == reference()
