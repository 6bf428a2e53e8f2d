"""`neoflex generate`: one prompt, its answer streamed to the terminal."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from neoflex.channel import DEFAULT_ADDRESS
from neoflex.cli.arguments import (
    ApiKeyFile,
    CaFile,
    CertificateFile,
    KeyFile,
    ServerAddress,
    ServerName,
    UseTls,
    access_of,
    check_prompt,
    connect,
)
from neoflex.cli.output import describe_usage, err, out
from neoflex.client import Client, Stream
from neoflex.generation import Completion, GenerateOptions, Message, PositionLogprobs

# gRPC counts nanoseconds in 64 bits: a later deadline would count as over already.
_MAX_TIMEOUT_S = 1e9


def _check_timeout(timeout: float | None) -> float | None:
    if timeout is not None and not 0 < timeout <= _MAX_TIMEOUT_S:
        raise typer.BadParameter(f"must be greater than 0 and at most {_MAX_TIMEOUT_S:g}, is {timeout:g}")
    return timeout


def generate(
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads standard input.')],
    address: ServerAddress = DEFAULT_ADDRESS,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Use the model's chat template, or the bare text.")] = True,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this sum.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the K likeliest tokens; 0 keeps all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens at least this share of the likeliest.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the answer repeatable.")] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Taken from the logits of tokens that the answer contains.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, for each time that it contains them.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Divides the logits of tokens that prompt or answer contain.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema: the answer is a value that it describes.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression that the whole answer matches.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="A text that the answer may be; repeat for others.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Show log-probabilities and the N likeliest tokens.")] = None,
    service_class: Annotated[
        str | None, typer.Option("--class", help="Service class; neoflex status lists the server's.")
    ] = None,
    ttft: Annotated[float | None, typer.Option(help="Target of the time to the first token, in seconds.")] = None,
    tpot: Annotated[float | None, typer.Option(help="Target of the time from token to token, in seconds.")] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds for the whole answer.", callback=_check_timeout)
    ] = None,
    tls: UseTls = False,
    ca_file: CaFile = None,
    certificate_file: CertificateFile = None,
    key_file: KeyFile = None,
    server_name: ServerName = None,
    api_key_file: ApiKeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Generate an answer to a prompt."""
    if prompt == "-":
        prompt = _standard_input()
    check_prompt(prompt, raw=not chat)
    if system is not None and not chat:
        raise typer.BadParameter("needs --chat", param_hint="--system")
    options = GenerateOptions()
    if chat:
        options["messages"] = [*([Message("system", system)] if system is not None else []), Message("user", prompt)]
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "json_schema": _file_text(json_schema, "--json-schema") if json_schema else None,
        "regex": regex,
        "choice": choice,
        "stop": stop,
        "logprobs": logprobs,
        "service_class": service_class,
        "ttft_s": ttft,
        "tpot_s": tpot,
    }
    options.update({name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]
    text = None if chat else prompt
    access = access_of(tls, ca_file, certificate_file, key_file, server_name, api_key_file)
    with connect(address, access) as client:
        try:
            if as_json:
                _print_json(client.generate(text, timeout=timeout, **options))
            else:
                _show(client, client.stream(text, timeout=timeout, **options))
        except ValueError as error:  # A number that no request can carry.
            raise typer.BadParameter(str(error)) from error


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is no text: {error}", param_hint="PROMPT") from error


def _file_text(path: Path, option: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot be read: {error}", param_hint=option) from error


def _print_json(answer: Completion) -> None:
    fields = dataclasses.asdict(answer)
    fields["finish"]["reason"] = answer.finish.reason.value
    sys.stdout.write(json.dumps(fields, ensure_ascii=False) + "\n")


def _show(client: Client, stream: Stream) -> None:
    with stream:  # Ctrl-C closes it, and so ends the request.
        positions = _print_stream(stream)
    if positions:
        _print_logprobs(client, positions)
    if stream.usage and stream.finish:
        err.print(f"[dim]{describe_usage(stream.usage)} · {stream.finish.reason.value}[/]")


def _print_stream(stream: Stream) -> list[PositionLogprobs]:
    """Writes the text as it comes; returns the log-probabilities that came with it."""
    positions: list[PositionLogprobs] = []
    wrote = False
    try:
        for delta in stream:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            wrote = wrote or bool(delta.text)
            positions += delta.logprobs
    finally:  # Also before an error's line.
        if wrote:
            sys.stdout.write("\n")
            sys.stdout.flush()
    return positions


def _print_logprobs(client: Client, positions: list[PositionLogprobs]) -> None:
    ids = {item.token_id for position in positions for item in (position.chosen, *position.top)}
    texts = {token_id: repr(client.detokenize([token_id])) for token_id in ids}
    table = Table("token", "id", "logprob")
    table.add_column("likeliest", overflow="fold")
    for position in positions:
        top = ", ".join(f"{texts[item.token_id]} {item.logprob:.3f}" for item in position.top)
        chosen = position.chosen
        table.add_row(texts[chosen.token_id], str(chosen.token_id), f"{chosen.logprob:.3f}", top)
    out.print(table)
