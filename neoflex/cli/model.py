"""`neoflex model`: which models come by name, and fetching them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from neoflex.cli.output import fetch_model, out
from svc_common.config import ModelConfig, load
from svc_common.memory import size_text
from svc_common.model.store import BUILTIN_MODELS, list_models, resolve

app = typer.Typer(no_args_is_help=True, help="Fetch and list models.")


@app.command()
def fetch(
    name: Annotated[str | None, typer.Argument(help="A built-in model.", show_default=ModelConfig().source)] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="The model of this TOML file instead, a hub's too.")
    ] = None,
) -> None:
    """Download a built-in model, check its hash and keep it in the cache directory."""
    if config_file is None:
        files = fetch_model(name or ModelConfig().source)
    elif name is not None:
        raise typer.BadParameter("a name and --config are two models", param_hint="NAME")
    else:
        source = load(config_file).model.source
        files = fetch_model(source) if source in BUILTIN_MODELS else resolve(source)
    out.print(f"{files.name}: {files.gguf or files.directory}", soft_wrap=True, markup=False)


@app.command("list")
def list_() -> None:
    """List the built-in models. Any directory, GGUF file or hub id works with `neoflex up`, too."""
    table = Table("model", "size", "license")
    table.add_column("where", overflow="fold")  # A path that is cut off helps nobody.
    for model in list_models():
        where = str(model.path) if model.path else f"not here: neoflex model fetch {model.name}"
        table.add_row(model.name, size_text(model.size_bytes), model.license, where)
    out.print(table)
