"""What the command prints, and its exit codes, against a scripted server."""

import io
import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from support.command import Ended, Run
from support.inference import InferenceServer
from support.stacks import own_environment

from neoflex.cli import model, voice
from neoflex.cli.output import STARTING
from neoflex.cli.supervise import print_logs, run_directory
from neoflex.cli.up import divide_cpu_attn, effective_config, pin_model, with_gateway
from neoflex.cli.voice import JsonVoice, PlainVoice
from neoflex.client import Client
from neoflex.logs import LogFollower
from svc_common.config import Config, ConfigError, GatewayConfig
from svc_common.memory import size_text
from svc_common.model.store import BUILTIN_MODELS


class TestGenerate:
    def test_streams_the_answer_and_says_what_it_took(self, run: Run, server: InferenceServer) -> None:
        ended = run("generate", "hello", "--address", server.address, "--raw", "--temperature", "0")
        assert (ended.code, ended.out) == (0, "a b c\n")
        assert ended.err == "5 tokens in, 3 out · TTFT 250 ms · TPOT 500.0 ms · recomputed once · stop\n"
        request = server.servicer.last_request
        assert request is not None
        assert (request.text, request.sampling.temperature) == ("hello", 0)
        assert request.sampling.HasField("temperature")

    def test_chat_is_the_default(self, run: Run, server: InferenceServer) -> None:
        assert run("generate", "hello", "--address", server.address, "--system", "Be brief.").code == 0
        request = server.servicer.last_request
        assert request is not None
        turns = [(turn.role, turn.content) for turn in request.chat.messages]
        assert turns == [("system", "Be brief."), ("user", "hello")]

    def test_options_reach_the_server(self, run: Run, server: InferenceServer) -> None:
        options = ["--max-tokens", "7", "--top-p", "0.5", "--top-k", "3", "--min-p", "0.25", "--seed", "9"]
        options += ["--stop", "A", "--stop", "B"]
        assert run("generate", "hello", "--address", server.address, *options).code == 0
        request = server.servicer.last_request
        assert request is not None
        sampling = request.sampling
        assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (0.5, 3, 0.25, 9)
        assert (request.stopping.max_tokens, list(request.stopping.stop)) == (7, ["A", "B"])

    def test_penalties_and_constraints_reach_the_server(
        self, run: Run, server: InferenceServer, tmp_path: Path
    ) -> None:
        schema = tmp_path / "schema.json"
        schema.write_text('{"type": "null"}')
        command = ("generate", "hello", "--address", server.address)
        options = ["--presence-penalty", "0.5", "--frequency-penalty", "-0.5", "--repetition-penalty", "1.25"]
        assert run(*command, *options, "--json-schema", str(schema)).code == 0
        request = server.servicer.last_request
        assert request is not None
        sampling = request.sampling
        penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        assert penalties == (0.5, -0.5, 1.25)
        assert request.constraint.json_schema == '{"type": "null"}'
        assert run(*command, "--choice", "yes", "--choice", "no").code == 0
        assert server.servicer.last_request is not None
        assert list(server.servicer.last_request.constraint.choice.texts) == ["yes", "no"]
        assert run(*command, "--regex", "[0-9]+").code == 0
        assert server.servicer.last_request.constraint.regex == "[0-9]+"
        ended = run(*command, "--regex", "a", "--choice", "b")
        assert ended.code == 2
        assert "give at most one of: regex, choice" in ended.err
        ended = run(*command, "--json-schema", str(tmp_path / "none"))
        assert ended.code == 2
        assert "cannot be read" in ended.err

    def test_a_class_and_targets_reach_the_server(self, run: Run, server: InferenceServer) -> None:
        options = ["--class", "chat", "--ttft", "0.5", "--tpot", "0.025"]
        ended = run("generate", "hello", "--address", server.address, *options)
        assert ended.err.endswith(" · recomputed once · late · stop\n")
        request = server.servicer.last_request
        assert request is not None
        assert request.service_class == "chat"
        targets = request.targets
        assert (targets.ttft.ToMilliseconds(), targets.tpot.ToMilliseconds()) == (500, 25)
        ended = run("generate", "hello", "--address", server.address, "--ttft", "nan", "--tpot", "1")
        assert ended.code == 2
        assert "ttft_s: nan is no duration" in ended.err

    def test_json(self, run: Run, server: InferenceServer) -> None:
        ended = run("generate", "hello", "--address", server.address, "--json")
        answer = json.loads(ended.out)
        assert (answer["text"], answer["token_ids"]) == ("a b c", [7, 8, 9])
        assert answer["finish"] == {"reason": "stop", "matched": "END"}
        assert answer["usage"]["time_to_first_token_s"] == 0.25

    def test_logprobs_are_shown(self, run: Run, server: InferenceServer) -> None:
        ended = run("generate", "hello", "--address", server.address, "--logprobs", "1")
        assert server.servicer.last_request is not None
        assert server.servicer.last_request.output.logprobs == 1
        assert "-1.500" in ended.out
        assert "'\\t' -0.250" in ended.out  # Token 9, as the scripted server decodes it.

    def test_a_prompt_from_standard_input(
        self, run: Run, server: InferenceServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
        assert run("generate", "-", "--address", server.address, "--raw").code == 0
        assert server.servicer.last_request is not None
        assert server.servicer.last_request.text == "from a pipe"

    def test_errors_are_one_line(self, run: Run, server: InferenceServer) -> None:
        ended = run("generate", "malformed", "--address", server.address, "--raw")
        expected = "error: INVALID_ARGUMENT BAD_FIELD: request.sampling.top_p: must be in (0, 1], is 3\n"
        assert ended == Ended(1, "", expected)

    def test_text_before_an_error_is_kept(self, run: Run, server: InferenceServer) -> None:
        ended = run("generate", "lost midway", "--address", server.address, "--raw")
        assert (ended.code, ended.out) == (1, "a \n")
        assert ended.err.startswith("error: UNAVAILABLE CPU_ATTENTION_LOST: ")

    def test_nobody_there(self, run: Run) -> None:
        ended = run("generate", "hello", "--address", "unix:/nonexistent/socket")
        assert ended.code == 1
        assert ended.err.startswith("error: UNAVAILABLE: no answer from unix:/nonexistent/socket")
        assert ended.err.count("\n") == 1

    @pytest.mark.parametrize("address", ["localhost", "http://localhost:50051", "unix:", "127.0.0.1:", ""])
    def test_an_address_that_is_none_is_a_usage_error(self, run: Run, address: str) -> None:
        for command in (("generate", "hello"), ("status",)):
            ended = run(*command, "--address", address)
            assert ended.code == 2
            assert f"""Invalid value for '--address': must be "host:port" or "unix:path", is '{address}'""" in ended.err

    @pytest.mark.parametrize(("prompt", "mode"), [("", "--chat"), (" \n", "--chat"), ("", "--raw")])
    def test_an_empty_prompt_is_a_usage_error(
        self, run: Run, server: InferenceServer, monkeypatch: pytest.MonkeyPatch, prompt: str, mode: str
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(prompt))
        for argument in (prompt, "-"):
            ended = run("generate", argument, mode, "--address", server.address)
            assert (ended.code, ended.out) == (2, "")
            assert "Invalid value for PROMPT: the prompt is empty" in ended.err

    def test_blanks_are_a_raw_prompt(self, run: Run, server: InferenceServer) -> None:
        assert run("generate", "\n", "--raw", "--address", server.address).out == "a b c\n"

    def test_a_prompt_that_is_no_text(self, run: Run, server: InferenceServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
        ended = run("generate", "-", "--address", server.address)
        assert ended.code == 2
        assert "Invalid value for PROMPT: standard input is no text" in ended.err

    @pytest.mark.parametrize("timeout", ["-1", "0", "nan", "inf", "1e+12"])
    def test_a_timeout_that_is_none_is_a_usage_error(self, run: Run, server: InferenceServer, timeout: str) -> None:
        ended = run("generate", "hello", "--address", server.address, "--timeout", timeout)
        assert ended.code == 2
        assert f"Invalid value for '--timeout': must be greater than 0 and at most 1e+09, is {timeout}" in ended.err

    def test_a_timeout_that_passes(self, run: Run, server: InferenceServer) -> None:
        ended = run("generate", "never", "--raw", "--address", server.address, "--timeout", "0.05")
        assert ended.code == 1
        assert ended.err == f"error: DEADLINE_EXCEEDED: no complete answer from {server.address} within 0.05 s\n"

    def test_a_number_out_of_range_is_a_usage_error(self, run: Run, server: InferenceServer) -> None:
        ended = run("generate", "hello", "--address", server.address, "--seed", "-1")
        assert ended.code == 2
        assert "seed: Value out of range" in ended.err


class TestStatus:
    def test_table(self, run: Run, server: InferenceServer) -> None:
        ended = run("status", "--address", server.address)
        lines = {
            line.strip(" │").split("│")[0].strip(): line.strip(" │").split("│")[-1].strip()
            for line in ended.out.splitlines()
        }
        assert lines["KV on the GPU"] == "3.0 MiB of 64.0 MiB in fp16"
        assert lines["KV on the host"] == "2.5 MiB of 64.0 MiB in int8"
        assert lines["blocks"] == "5 of 128"
        assert lines["pool 0"] == "2.5 MiB of 64.0 MiB, 2 threads"
        sizes = [lines[name] for name in ("tokens in a KV block", "its size on the GPU", "and on the host")]
        assert sizes == ["16", "1.0 MiB", "512.0 KiB"]
        assert lines["pool 1"] == "not attached: nothing answers at unix:/x"
        assert lines["device"] == "cpu, computes in fp32"
        assert lines["CPU attention threads"] == "2, elastic from 1 to 4"
        assert lines["CPU threads given, taken"] == "3 times, twice"
        assert lines["requests waiting"] == "1 of at most 1,024"
        assert lines["iterations, GPU-only"] == "40"
        assert lines["iterations, asymmetric"] == "2"
        assert lines["iterations, same-layer"] == "7"
        assert lines["iterations, decoupled"] == "5"
        assert lines["tokens attended on the CPU"] == "1,234"
        assert ended.err == "no GPU here: torch on the CPU plays the GPU, in a process of its own\n"

    def test_classes(self, run: Run, server: InferenceServer) -> None:
        text = run("status", "--address", server.address).out
        rows = [line.split() for line in text.splitlines()]
        assert ["Service", "classes,", "default", "by", "default"] in rows
        assert ["chat", "0.5/0.05", "5", "2.5", "2", "0", "40", "3", "1,200"] in rows
        assert ["default", "none", "0", "1", "0", "1", "0", "0", "never"] in rows

    def test_json(self, run: Run, server: InferenceServer) -> None:
        values = json.loads(run("status", "--address", server.address, "--json").out)
        assert values["model"]["name"] == "tiny"
        assert values["server"]["counters"]["cpu_attended_tokens"] == 1234
        assert values["load"]["gpu_blocks_used"] == 3
        assert values["server"]["calibration"] == {
            "weights": 1.25,
            "tokens": 0.75,
            "prefill": 1.5,
            "gpu_decode": 0.5,
            "overhead": 3,
            "contention": 0.125,
            "cpu_decode": 2,
            "head": 1.75,
            "swap": 0.25,
            "further_pools": {},
        }

    def test_calibration(self, run: Run, server: InferenceServer) -> None:
        rows = [line.rsplit(maxsplit=1) for line in run("status", "--address", server.address).out.splitlines()]
        assert ["linear operations, one token", "1.25"] in rows
        assert ["attention of decodes on the CPU", "2.00"] in rows
        assert ["the rest", "3.00"] in rows
        assert ["slower while both processors work", "12%"] in rows

    def test_eighty_columns_are_enough(
        self, run: Run, server: InferenceServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No word is cut off, and no number broken."""

        def cells(text: str) -> list[list[str]]:
            return [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]

        wide = cells(run("status", "--address", server.address).out)
        monkeypatch.setattr(model.out, "_width", 80)
        narrow = run("status", "--address", server.address).out
        assert max(map(len, narrow.splitlines())) <= 80
        assert [[cell.strip() for cell in row] for row in cells(narrow)] == [
            [cell.strip() for cell in row] for row in wide
        ]


class TestModel:
    def test_list_says_what_is_here(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        listed = BUILTIN_MODELS["smollm2-135m-instruct"]
        assert "not here: neoflex model fetch smollm2-135m-instruct" in run("model", "list").out
        path = listed.path(tmp_path / "neoflex")
        path.parent.mkdir(parents=True)
        with path.open("wb") as file:
            file.truncate(listed.size_bytes)
        assert path.name in run("model", "list").out

    def test_the_path_is_whole_where_the_terminal_is_narrow(
        self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(model.out, "_width", 80)
        path = BUILTIN_MODELS["smollm2-135m-instruct"].path(tmp_path / "neoflex")
        path.parent.mkdir(parents=True)
        with path.open("wb") as file:
            file.truncate(BUILTIN_MODELS["smollm2-135m-instruct"].size_bytes)
        lines = run("model", "list").out.splitlines()
        assert lines[:4] == [
            "model smollm2-135m-instruct",
            f"  size     {size_text(path.stat().st_size)}",
            "  license  Apache-2.0",
            f"  where    {path}",
        ]

    def test_fetching_an_unknown_model(self, run: Run) -> None:
        ended = run("model", "fetch", "nope")
        assert (ended.code, ended.err) == (
            1,
            "error: 'nope' is no built-in model; there are: smollm2-135m-instruct, gemma-3-270m\n",
        )

    def test_fetching_the_model_of_a_configuration(
        self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        file = tmp_path / "neoflex.toml"
        gguf = tmp_path / "own.gguf"
        gguf.write_bytes(b"GGUF")
        file.write_text(f'[model]\nsource = "{gguf}"\n')
        assert run("model", "fetch", "--config", str(file)).out == f"own: {gguf}\n"
        listed = BUILTIN_MODELS["smollm2-135m-instruct"]
        path = listed.path(tmp_path / "neoflex")
        path.parent.mkdir(parents=True)
        with path.open("wb") as made:
            made.truncate(listed.size_bytes)
        file.write_text('[model]\nsource = "smollm2-135m-instruct"\n')
        assert run("model", "fetch", "--config", str(file)).out == f"smollm2-135m-instruct: {path}\n"
        ended = run("model", "fetch", "gemma-3-270m", "--config", str(file))
        assert ended.code == 2
        assert "a name and --config are two models" in ended.err


class TestUp:
    def test_options_win_over_the_file(self, tmp_path: Path) -> None:
        file = tmp_path / "neoflex.toml"
        file.write_text('[planner]\nmode = "gpu_only"\nmax_batch_tokens = 64\n[gpu]\nkv_bytes = "1MiB"\n')
        config = effective_config(
            file, {("planner", "mode"): "auto", ("gpu", "kv_bytes"): None, ("kv", "dtype"): "fp16"}
        )
        assert (config.planner.mode, config.planner.max_batch_tokens) == ("auto", 64)
        assert (config.gpu.kv_bytes, config.kv.dtype) == (2**20, "fp16")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[gpu]\nkv_byte = 3\n", r"neoflex\.toml: gpu\.kv_byte: unknown key$"),
            ("gpu = 3\n", "gpu: must be a table of keys, is 3$"),
            ("[gpu\n", "not TOML"),
            (None, "No such file"),
        ],
    )
    def test_a_bad_file_is_refused(self, tmp_path: Path, text: str | None, message: str) -> None:
        file = tmp_path / "neoflex.toml"
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            effective_config(file, {("gpu", "kv_bytes"): "1MiB"})

    def test_bad_options_end_in_one_line(self, run: Run) -> None:
        ended = run("up", "--mode", "fast", "--host-kv-bytes", "lots")
        assert ended.code == 1
        assert ended.err == (
            "error: --mode: must be 'auto', 'gpu_only', 'asymmetric', 'same_layer' or 'decoupled', is 'fast';"
            " --host-kv-bytes: not a size such as 64MiB, is 'lots'\n"
        )
        assert run("up", "./nowhere").err == "error: ./nowhere: no such file or directory\n"

    def test_several_services_share_out_pool_and_threads(self) -> None:
        options = {("cpu_attn", "kv_bytes"): "90MiB", ("cpu_attn", "num_threads"): 5, ("cpu_attn", "max_threads"): 8}
        services = divide_cpu_attn(effective_config(None, options), 3).cpu_attn
        assert [service.kv_bytes for service in services] == [30 * 2**20] * 3
        assert [service.num_threads for service in services] == [2, 2, 1]
        assert [service.max_threads for service in services] == [3, 3, 2]
        assert [service.min_threads for service in services] == [1, 1, 1]
        assert not any("listen" in service.model_fields_set for service in services)

    @pytest.mark.parametrize(
        ("text", "number", "message"),
        [
            ("", 0, "--cpu-attn-services must be from 1 to 16, is 0"),
            ("", 17, "--cpu-attn-services must be from 1 to 16, is 17"),
            ("[[cpu_attn]]\n[[cpu_attn]]\n", 3, "--cpu-attn-services is 3, the file has 2 [[cpu_attn]]"),
            ('[cpu_attn]\nlisten = "unix:/a"\n', 2, "cpu_attn.listen is the address of one"),
            ("[cpu_attn]\nkv_bytes = 0\n", 2, "cpu_attn.kv_bytes has nothing to share out: 0"),
        ],
    )
    def test_services_that_cannot_be_had(self, tmp_path: Path, text: str, number: int, message: str) -> None:
        file = tmp_path / "neoflex.toml"
        file.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(message)):
            divide_cpu_attn(effective_config(file, {}), number)

    def test_an_option_does_not_say_which_of_several_services_it_is_for(self, tmp_path: Path) -> None:
        file = tmp_path / "neoflex.toml"
        file.write_text("[[cpu_attn]]\n[[cpu_attn]]\n")
        with pytest.raises(ConfigError, match=r"--cpu-threads: .* has several \[\[cpu_attn\]\]; set it there"):
            effective_config(file, {("cpu_attn", "num_threads"): 2})
        file.write_text("[[cpu_attn]]\n")
        assert effective_config(file, {("cpu_attn", "num_threads"): 2}).cpu_attn[0].num_threads == 2

    def test_there_is_a_gateway_unless_it_is_off(self) -> None:
        assert with_gateway(Config(), off=False).gateway == GatewayConfig()
        named = effective_config(None, {("gateway", "listen"): "127.0.0.1:9"})
        assert with_gateway(named, off=False) == named
        assert with_gateway(named, off=True).gateway is None
        with pytest.raises(ConfigError, match=r'^--http: must be "host:port"'):
            effective_config(None, {("gateway", "listen"): "9"})

    def test_an_option_and_the_file_are_told_apart(self, tmp_path: Path) -> None:
        file = tmp_path / "neoflex.toml"
        file.write_text('[gpu]\nkv_bytes = "much"\nnum_threads = -1\n')
        with pytest.raises(ConfigError) as caught:
            effective_config(file, {("gpu", "kv_bytes"): "more"})
        assert str(caught.value) == (
            f"--gpu-kv-bytes: not a size such as 64MiB, is 'more'; "
            f"{file}: gpu.num_threads: must be greater than or equal to 0, is -1"
        )

    @pytest.mark.parametrize("port", ["-1", "99999"])
    def test_a_port_that_is_none_is_a_usage_error(self, run: Run, port: str) -> None:
        ended = run("up", "--port", port)
        assert ended.code == 2
        assert f"Invalid value for '--port': must be from 0 to 65535, is {port}" in ended.err

    def test_a_port_in_use_leaves_nothing_behind(self, tmp_path: Path) -> None:
        model_file = tmp_path / "model.gguf"
        model_file.write_bytes(b"GGUF")
        temporary = tmp_path / "tmp"
        temporary.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            command = [sys.executable, "-m", "neoflex.cli", "up", str(model_file), "--port", address.split(":")[1]]
            environment = {**own_environment(), "TMPDIR": str(temporary)}
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        expected = (
            f"error: cannot listen on {address}: Address already in use;"
            " choose another port, or a free one with: neoflex up --port 0\n"
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", expected)
        assert list(temporary.iterdir()) == []

    def test_an_empty_cache_names_the_command_that_fills_it(
        self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        ended = run("up")
        assert ended.code == 1
        assert ended.err == (
            f"error: smollm2-135m-instruct is not in {tmp_path}/neoflex; fetch it with:"
            " neoflex model fetch smollm2-135m-instruct (93 MB)\n"
        )

    def test_help_says_the_defaults(self, run: Run) -> None:
        text = run("up", "--help").out
        defaults = {
            "model": "smollm2-135m-instruct",
            "--mode": "auto",
            "--gpu-kv-bytes": "512.0 MiB",
            "--host-kv-bytes": "1.0 GiB",
            "--port": "50051",
            "--max-batch-tokens": "512",
            "--max-sequence-tokens": "the model's context length",
        }
        for option, default in defaults.items():
            line = next(line for line in text.splitlines() if f" {option} " in line)
            assert f"[default: ({default})]" in line
        assert "other addresses, as planner.listen" in text

    def test_a_log_line_is_printed_in_one_piece(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        written: list[str] = []

        class Terminal(io.StringIO):
            def write(self, text: str) -> int:
                written.append(text)
                return len(text)

        monkeypatch.setattr(voice, "err", Console(file=Terminal(), width=40, color_system=None, force_terminal=True))
        paths = {"gpu_svc": tmp_path / "gpu_svc.log", "planner_svc": tmp_path / "planner_svc.log"}
        follower = LogFollower(paths)
        paths["gpu_svc"].write_text(f"[bold] :smile: {'x' * 60}\n")
        paths["planner_svc"].write_text("listening\n")
        print_logs(follower, PlainVoice())
        assert written == [f"     gpu_svc | [bold] :smile: {'x' * 60}\n", " planner_svc | listening\n"]

    def test_a_log_of_json_stays_one(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Whoever speaks: a service, its last words, the supervisor, the command."""
        own = '{"service": "gpu_svc", "message": "[bold] ready"}'
        path = tmp_path / "gpu_svc.log"
        follower = LogFollower({"gpu_svc": path})
        path.write_text(f"{own}\nFatal Python error: Segmentation fault\n\n1\n")
        speaker = JsonVoice()
        print_logs(follower, speaker)
        speaker.note("gpu_svc was ended by SIGSEGV; restart 1 of 5 in 0.5 s")
        speaker.say("[bold green]ready[/] on [bold]127.0.0.1:1[/]", markup=True)
        with speaker.starting() as spinner:
            spinner.update("starting 1 s")
        with pytest.raises(SystemExit):
            speaker.fail("gpu_svc was ended by SIGSEGV\ngpu_svc | last words")
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == own
        found = [json.loads(line) for line in lines[1:]]
        assert [(item["service"], item["level"], item["message"]) for item in found] == [
            ("gpu_svc", "ERROR", "Fatal Python error: Segmentation fault"),
            ("gpu_svc", "ERROR", "1"),
            ("neoflex up", "WARNING", "gpu_svc was ended by SIGSEGV; restart 1 of 5 in 0.5 s"),
            ("neoflex up", "INFO", "ready on 127.0.0.1:1"),
            ("neoflex up", "INFO", STARTING),
            ("neoflex up", "CRITICAL", "gpu_svc was ended by SIGSEGV\ngpu_svc | last words"),
        ]
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", item["time"]) for item in found)

    def test_the_model_is_found_once_and_keeps_its_name(self, tmp_path: Path) -> None:
        path = tmp_path / "Model.Q4.gguf"
        path.write_bytes(b"GGUF")
        config = pin_model(effective_config(None, {("model", "source"): str(tmp_path)}))
        assert (config.model.source, config.model.name) == (str(path), tmp_path.name)

    def test_a_temporary_run_directory_is_kept_only_for_its_logs(self, capsys: pytest.CaptureFixture[str]) -> None:
        with run_directory(None) as directory:
            assert directory.stat().st_mode & 0o077 == 0
        assert not directory.exists()

        def fail_after_writing(name: str) -> Path:
            try:
                with run_directory(None) as directory:
                    (directory / name).touch()
                    raise ConfigError("broken")
            except ConfigError:
                return directory

        assert not fail_after_writing("config.toml").exists()
        assert capsys.readouterr().err == ""
        kept = fail_after_writing("gpu_svc.log")
        assert (kept / "gpu_svc.log").exists()
        assert capsys.readouterr().err == f"logs are kept in {kept}\n"
        shutil.rmtree(kept)


class TestCtrlC:
    def test_while_it_imports(self) -> None:
        script = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # As in a terminal; a job in the background ignores it.
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from neoflex.cli import main
sys.argv[1:] = ["status"]
main()
"""
        command = [sys.executable, "-c", script]
        ended = subprocess.run(command, env=own_environment(), capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")

    def test_while_it_runs(self, run: Run, server: InferenceServer, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(client: Client) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Client, "model_info", interrupt)
        assert run("status", "--address", server.address) == Ended(130, "", "")


def test_sizes_for_people() -> None:
    assert [size_text(n) for n in (0, 1023, 1024, 98_362_432, 2**40, 2**50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "93.8 MiB",
        "1.0 TiB",
        "1024.0 TiB",
    ]


def test_services_do_not_pay_for_the_client() -> None:
    script = "import neoflex, sys; assert 'grpc' not in sys.modules; neoflex.Client; assert 'grpc' in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
