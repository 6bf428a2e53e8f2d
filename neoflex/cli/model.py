"""`neoflex model`: which models come by name, fetching them, and the packed weights that are kept of those served."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from neoflex.cli.output import err, fail, fetch_model, out
from neoflex.cli.tables import print_table
from svc_common.config import ModelConfig, load
from svc_common.memory import size_text
from svc_common.model.layer_cache import StoredLayers, layers_dir, stored_layers
from svc_common.model.layer_cache import prune as prune_layers
from svc_common.model.shapes import find_model
from svc_common.model.store import BUILTIN_MODELS, list_models
from svc_common.wording import counted

_UNUSED_DAYS = 30.0
_S_PER_DAY = 86_400

app = typer.Typer(no_args_is_help=True, help="Fetch and list models, and delete packed weights that nobody uses.")


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
        model = load(config_file).model
        files = (
            fetch_model(model.source) if model.source in BUILTIN_MODELS else find_model(model.source, model.load_format)
        )
    out.print(f"{files.name}: {files.gguf or files.directory}", soft_wrap=True, markup=False)


@app.command("list")
def list_() -> None:
    """List the built-in models, and packed weights of models that were served. Any directory, GGUF file or hub id works
    with `neoflex up`, too.
    """
    table = Table("model", "size", "license")
    table.add_column("where", overflow="fold")  # A path that is cut off helps nobody.
    for model in list_models():
        where = str(model.path) if model.path else f"not here: neoflex model fetch {model.name}"
        table.add_row(model.name, size_text(model.size_bytes), model.license, where)
    print_table(table)
    directory = layers_dir()
    if stored := stored_layers(directory):
        print_table(_layers_table(stored, directory))


@app.command()
def prune(
    unused_days: Annotated[
        float, typer.Option(min=0, help="Delete what no service has opened for so many days; 0: all.")
    ] = _UNUSED_DAYS,
) -> None:
    """Delete packed weights that have not been used of late; the models themselves stay.

    A service that runs goes on, and packs them again when it starts anew.
    """
    directory = layers_dir()
    try:
        deleted = prune_layers(directory, unused_days)
    except BlockingIOError:
        fail(f"a service packs or checks weights in {directory} just now; try again when it is ready")
    except OSError as error:
        fail(f"{directory}: {error.strerror}")
    if not deleted:
        days = f"{unused_days:g} day{'' if unused_days == 1 else 's'}"
        err.print(f"nothing in {directory} has been unused for {days}", markup=False, soft_wrap=True)
        return
    print_table(_layers_table(deleted, directory))
    out.print(f"{size_text(sum(item.num_bytes for item in deleted))} deleted")


def _layers_table(stored: tuple[StoredLayers, ...], directory: Path) -> Table:
    table = Table("packed weights of", "type", "size", "last used")
    table.add_column(f"file in {directory}", overflow="fold")
    for item in stored:
        table.add_row(
            item.model, item.dtype, size_text(item.num_bytes), _ago(time.time() - item.used_s), item.path.name
        )
    return table


def _ago(seconds: float) -> str:
    days = int(seconds // _S_PER_DAY)
    return "today" if days < 1 else f"{counted(days, 'day')} ago"
