"""`neoflex model`: which models come by name, and fetching them."""

from typing import Annotated

import typer
from rich.table import Table

from neoflex.cli.output import fetch_model, out
from svc_common.config import ModelConfig
from svc_common.memory import size_text
from svc_common.model.store import list_models

app = typer.Typer(no_args_is_help=True, help="Fetch and list models.")


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="A built-in model.")] = ModelConfig().source) -> None:
    """Download a built-in model, check its hash and keep it in the cache directory."""
    files = fetch_model(name)
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
