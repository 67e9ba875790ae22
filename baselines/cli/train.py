"""`agentgym train`: trains a model with a method."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentgym.cli.options import key_values
from agentgym.errors import UsageError


def train(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="TOML file, such as baselines/configs/alfworld-s.toml.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option("--method", "-m", help="Name from `agentgym methods`, or module:Class. [default: grpo]"),
    ] = None,
    env: Annotated[str | None, typer.Option("--env", "-e", help="Environment. [default: alfworld]")] = None,
    tasks: Annotated[str | None, typer.Option(help="Task set, such as alfworld/generated:s.")] = None,
    model: Annotated[
        str | None, typer.Option(help="tiny, smollm2-135m, a folder, or a hub id. [default: tiny]")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-O", metavar="KEY=VALUE", help="Option of the method; see `agentgym methods NAME`."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Setting of the run, such as optimiser.lr=1e-4."),
    ] = None,
    iterations: Annotated[int | None, typer.Option(min=1, help="Iterations of play and update.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of everything random.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run directory. [default: runs/METHOD-TIME]")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Continue this run directory from its last checkpoint.")
    ] = None,
) -> None:
    """Trains a model on an environment. Stop it at any time, then continue with --resume."""
    from agentgym.errors import require_extra

    for package in ("torch", "transformers", "accelerate"):
        require_extra(package, extra="train")
    from agentgym.baselines.cli.progress import TrainProgress
    from agentgym.baselines.core.config import make_train_config, merge, read_train_config
    from agentgym.baselines.core.record import CONFIG, read_metrics
    from agentgym.baselines.core.run import quiet
    from agentgym.baselines.core.trainer import train as run_training

    quiet()
    changes = _changes(method, env, tasks, model, option, set_, iterations, seed)
    if resume is not None:
        if config is not None or changes or out not in (None, resume):
            raise UsageError("--resume continues the run as its train.toml says; leave the other options out")
        settings, out = read_train_config(resume / CONFIG), resume
    else:
        settings = read_train_config(config, **changes) if config is not None else make_train_config(merge({}, changes))
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        out = out or Path("runs") / f"{settings.method.replace(':', '-')}-{stamp}"
    console = Console(stderr=True)
    try:
        with TrainProgress(console, settings.iterations) as progress:
            status = run_training(settings, out, resume=resume is not None, watch=progress.watch)
    except KeyboardInterrupt:
        console.print(f"\nStopped. Continue with: agentgym train --resume {escape(str(out))}", highlight=False)
        raise typer.Exit(130) from None
    shown = Console()
    shown.print(_table(read_metrics(out)))
    shown.print(f"{status['reason']}. Run: {escape(str(out))}", highlight=False, soft_wrap=True)


def _changes(
    method: str | None,
    env: str | None,
    tasks: str | None,
    model: str | None,
    option: list[str] | None,
    settings: list[str] | None,
    iterations: int | None,
    seed: int | None,
) -> dict[str, Any]:
    given = {"method": method, "env": env, "model": model, "iterations": iterations, "seed": seed}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if tasks is not None:
        changes["env_kwargs"] = {"tasks": tasks}
    if option:
        changes["method_options"] = key_values(option, option="--option")
    for item in settings or []:
        name, separator, text = item.partition("=")
        *tables, last = name.split(".")
        if not separator or not last:
            raise UsageError(f"--set takes KEY=VALUE, such as --set optimiser.lr=1e-4, not {item!r}")
        place = changes
        for table in tables:
            place = place.setdefault(table, {})
        place |= key_values([f"{last}={text}"], option="--set")
    return changes


def _table(lines: list[dict[str, Any]]) -> Table:
    """The held-out scores of a run."""
    table = Table(
        "iteration", "decoding", "games", "success", "turns", "invalid", "-log p", "env steps", title="Held out"
    )
    for line in lines:
        if line["kind"] == "eval":
            table.add_row(
                str(line["iteration"]),
                line["mode"],
                str(line["episodes"]),
                *(f"{line.get(name, float('nan')):.3f}" for name in ("success", "turns", "invalid", "surprise")),
                str(line["env_steps"]),
            )
    return table
