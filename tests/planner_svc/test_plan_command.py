"""`neoflex plan` as a user meets it: tables, JSON, pictures, and what is said of bad input."""

import json
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from planner_svc.advisor import __main__ as advisor
from planner_svc.advisor.machines import known_machines, read_machine
from planner_svc.advisor.models import find_spec
from planner_svc.policy import PolicyEstimator, RequestMix, decoder_figures
from svc_common.model import shapes
from svc_common.model.shapes import known_shapes
from svc_common.policy import ExecutionPolicy

SHAPES = Path(shapes.__file__).with_name("known_shapes")
MACHINE = """
[gpu]
flops_per_s = 100e12
bytes_per_s = 1e12
memory = "10GiB"
link = { up_bytes_per_s = 20e9, down_bytes_per_s = 20e9, both_bytes_per_s = 15e9 }
[host]
linear = [[1, 2e12]]
bytes_per_s = 100e9
memory = "64GiB"
"""
PARAMETERS = {
    # As the models' own papers give them, in billions.
    "opt-30b": 30.0,
    "opt-66b": 66.0,
    "llama-2-7b": 6.74,
    "llama-2-70b": 69.0,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
}


@pytest.fixture
def plan(monkeypatch, capsys, tmp_path):
    """Runs it; returns exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "box.toml").write_text(MACHINE)

    def run(*options: str, model: str = "llama-2-7b", hardware: str = "box.toml"):
        monkeypatch.setattr(sys, "argv", ["neoflex plan", "--model", model, "--hardware", hardware, *options])
        code = 0
        try:
            advisor.main()
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr()

    return run


def test_json(plan):
    code, out, err = plan("--prompt", "512", "--output", "32", "--batch", "4", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["title"] == "llama-2-7b in bf16 on box: 4 requests, 512 tokens in, 32 out"
    assert found["mix"] == {"prompt_tokens": 512, "output_tokens": 32, "num_sequences": 4, "batch_tokens": 16384}
    policies = found["policies"]
    assert len(policies) > 3
    best = policies[0]
    assert best["name"] == "offloading / partition"
    assert best["resident_layers"] + best["decode_cpu_layers"] <= 32
    for policy in policies:
        assert policy["memory"]["gpu"]["total_bytes"] <= 10 * 2**30 - 2**30
        assert policy["memory"]["host"]["total_bytes"] <= 64 * 2**30
        assert policy["total_s"] == pytest.approx(policy["prefill"]["total_s"] + policy["decode"]["total_s"])
        assert policy["total_s"] >= best["total_s"]
        assert policy["decode"]["iterations"] == 31
        assert policy["decode"]["busy_s"].keys() == {"gpu", "cpu", "up", "down"}
    assert found["why"][0].startswith("Prefill by offloading")
    # Streaming decode: all that is not resident crosses the link for each token.
    streamed = next(item for item in policies if item["name"] == "offloading")
    layer_bytes = find_spec("llama-2-7b").layer_bytes(0, 2)
    assert streamed["decode"]["link_up_bytes"] == (32 - streamed["resident_layers"]) * layer_bytes


def test_tables(plan):
    code, out, err = plan()
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    first = next(line for line in lines if line[:3] == ["offloading", "/", "partition"])
    assert first[3] == "1.00"
    assert "Decode by partition (" in out
    assert ["offloading", "/", "partition", "0", "/"] in [line[:5] for line in lines]  # Layers of prefill, by place.
    tables, _, why = out.partition("Why\n")
    assert max(map(len, tables.splitlines())) <= 80
    assert max(map(len, why.splitlines())) <= 200


def test_one_request(plan):
    _, out, _ = plan("--batch", "1", "--prompt", "1", "--output", "1")
    assert out.splitlines()[0] == "llama-2-7b in bf16 on box: 1 request, 1 token in, 1 out"


def test_memory_and_type_change_the_answer(plan):
    _, out, _ = plan("--gpu-memory", "80GiB", "--json")
    assert json.loads(out)["policies"][0]["resident_layers"] == 32
    _, out, _ = plan("--gpu-memory", "17GiB", "--dtype", "fp32", "--json")
    assert json.loads(out)["policies"][0]["resident_layers"] < 32


def test_pictures(plan, tmp_path):
    code, _, _ = plan("--png", "a.png", "--svg", "b.svg")
    assert code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    root = ElementTree.parse(tmp_path / "b.svg").getroot()
    assert root.tag.endswith("svg")
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 32


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--prompt", "0"], "argument --prompt: must be from 1 to 10,000,000, is 0"),
        (["--batch", "1e9"], "argument --batch: must be a whole number, is '1e9'"),
        (["--batch", "100001"], "argument --batch: must be from 1 to 100,000, is 100001"),
        (["--output", "4000"], "--prompt and --output: the model's context is 4,096 tokens, these are 4,512 together"),
        (["--gpu-memory", "much"], "argument --gpu-memory: must be a size such as 24GiB, is 'much'"),
        (["--host-memory", "9999PiB"], "argument --host-memory: must be from 1 byte to 1 PiB"),
        (["--png", "no/such.png"], "argument --png: cannot write no/such.png: No such file or directory"),
        (["--svg", "a.png"], "argument --svg: the file must end in .svg, is a.png"),
    ],
)
def test_bad_options_are_named(plan, options, complaint):
    code, out, err = plan(*options)
    assert (code, out) == (2, "")
    assert complaint in err


def test_what_nothing_fits(plan):
    code, _, err = plan("--host-memory", "1GiB", "--batch", "500")
    assert code == 1
    assert "no policy fits: memory: 500 sequences of 544 tokens" in err


def test_unknown_models_and_machines(plan, tmp_path):
    code, _, err = plan(model="gpt-9")
    assert code == 2
    assert "--model: 'gpt-9' is no built-in model" in err
    assert "llama-2-70b" in err
    code, _, err = plan(hardware="a100")
    assert code == 2
    assert "--hardware: 'a100' is neither a .toml file nor a known GPU; there are t4, " in err
    _, _, err = plan(hardware="t4+none")
    assert "--hardware: 'none' is no known host; there are " in err
    _, _, err = plan(hardware="no.toml")
    assert "--hardware: no.toml: No such file or directory" in err
    for text, complaint in (
        (MACHINE.replace("[[1, 2e12]]", "[[1, 2e12], [2, 9e12]]"), "host.linear: Value error, 2 tokens take less time"),
        (MACHINE.replace("100e12", "-1"), "gpu.flops_per_s: Input should be greater than 0"),
        (MACHINE + "cores = 3\n", "host.cores: Extra inputs are not permitted"),
        ("[gpu", "not TOML"),
    ):
        (tmp_path / "bad.toml").write_text(text)
        code, _, err = plan(hardware="bad.toml")
        assert code == 2
        assert complaint in err


def test_shapes_from_files(plan, tmp_path):
    directory = tmp_path / "mine"
    shutil.copytree(SHAPES / "llama-2-7b", directory)
    _, by_name, _ = plan("--json")
    for model in (str(directory), str(directory / "config.json")):
        code, out, err = plan("--json", model=model)
        assert (code, err) == (0, "")
        assert json.loads(out)["policies"] == json.loads(by_name)["policies"]
    (directory / "config.json").rename(directory / "other.json")
    _, _, err = plan(model=str(directory / "other.json"))
    assert "--model: a configuration must be called config.json, is other.json" in err


def test_built_in_shapes_have_the_sizes_they_are_called_by():
    assert set(known_shapes()) == set(PARAMETERS)
    for name, billions in PARAMETERS.items():
        assert find_spec(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_every_machine_runs_a_small_model():
    figures = decoder_figures(find_spec("llama-2-7b"), 2, 2)
    mix = RequestMix(128, 8, 1, 16384)
    for name in known_machines():
        machine = read_machine(name)
        found = PolicyEstimator(figures, machine).predict(ExecutionPolicy(32), mix)
        # Reading 13 GB of weights at the GPU's bandwidth; beside it launches, and what an iteration costs.
        beside_s = 32 * machine.gpu.layer_s + machine.iteration_s
        assert found.tpot_s == pytest.approx(13.2e9 / machine.gpu.bytes_per_s + beside_s, rel=0.03)
