"""The command line: one module a command, all registered here by their function names."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
from typing import Annotated

import typer
from rich.console import Console

from agentgym import __version__
from agentgym.cli import check, data, evaluate, listing, play, replay, show
from agentgym.errors import AgentGymError

app = typer.Typer(
    name="agentgym",
    help="Environments and benchmarks for multi-turn LLM agents.",
    epilog="Start with: agentgym list, then agentgym eval --env alfworld --policy expert --episodes 20",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"agentgym {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Environments and benchmarks for multi-turn LLM agents."""


app.command("list")(listing.list_everything)
app.command("check")(check.check)
app.command("play")(play.play)
app.command("eval")(evaluate.evaluate)
app.command("replay")(replay.replay)
app.command("show")(show.show)
app.add_typer(data.app, name="data")


def _add_commands() -> None:
    """Adds what the floors above this one offer: any package beside this one with a module `commands`."""
    import agentgym

    for module in pkgutil.iter_modules(agentgym.__path__):
        if module.ispkg and importlib.util.find_spec(f"agentgym.{module.name}.commands") is not None:
            importlib.import_module(f"agentgym.{module.name}.commands").register(app)


_add_commands()


def main() -> None:
    """Runs a command; a bad call or bad data is one message and exit code 2."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # policies and environments of your own, as with python -m
    try:
        app()
    except AgentGymError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {_escape(str(error))}")
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(141)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
