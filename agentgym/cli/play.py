"""`agentgym play`: a person plays."""

from __future__ import annotations

from typing import Annotated

import typer

from agentgym.cli.options import EnvOptions, Tasks, env_kwargs
from agentgym.registry import make_env


def play(
    env: Annotated[str, typer.Argument(metavar="ENV", help="Environment: a family name or id.")] = "alfworld",
    tasks: Tasks = None,
    split: Annotated[str, typer.Option(help="Split of the task set.")] = "test",
    task: Annotated[str | None, typer.Option(help="Task: an id, or a position within the split.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the episode; also draws the task where none is given.")
    ] = None,
    env_option: EnvOptions = None,
) -> None:
    """Plays an environment in the terminal: Tab completes, `hint`, `undo`, `help`, `quit`."""
    from agentgym.policies.human import play as play_env

    made = make_env(env, split=split, **env_kwargs(env_option, tasks))
    try:
        play_env(made, seed=seed, task=int(task) if task is not None and task.isdecimal() else task)
    finally:
        made.close()
