"""The compose files against the specification's schema. Needs no daemon."""

import subprocess
import sys

from support.compose import COMPOSE_DIR


def test_every_file_keeps_to_the_schema_of_the_compose_specification() -> None:
    files = sorted(str(path) for path in COMPOSE_DIR.glob("*.yaml"))
    assert str(COMPOSE_DIR / "docker-compose.yaml") in files
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ok -- validation done\n"), done.stdout


def test_the_schema_finds_mistakes(tmp_path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("services: {a: {image: b, readonly: true}}\n")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "'readonly' was unexpected" in done.stdout
