"""Options that several commands share, and how `key=value` is read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from agentgym.errors import UsageError

Env = Annotated[str, typer.Option("--env", "-e", help="Environment: a family name such as alfworld, or a full id.")]
EnvOptions = Annotated[
    list[str] | None,
    typer.Option("--env-option", "-E", metavar="KEY=VALUE", help="Option of the environment; may be repeated."),
]
Tasks = Annotated[
    str | None,
    typer.Option(help="Task set, such as alfworld/generated:s, or a path to official files. [default: the family's]"),
]
Backend = Annotated[str, typer.Option(help="Where environments live: serial, threads, processes or ray.")]
Workers = Annotated[int, typer.Option("--workers", "-w", min=1, help="Worker processes (or threads, or actors).")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, as printed by agentgym eval.")]


def key_values(items: list[str] | None, *, option: str) -> dict[str, Any]:
    """Reads KEY=VALUE items; a value is read as TOML (3, 0.5, true, [1, 2], "text"), else as plain text.

    Raises:
        UsageError: for an item without "=".
    """
    values: dict[str, Any] = {}
    for item in items or []:
        key, separator, text = item.partition("=")
        if not separator or not key.isidentifier():
            raise UsageError(f"{option} takes KEY=VALUE, such as {option} max_turns=30, not {item!r}")
        try:
            values[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key] = text
    return values


def env_kwargs(options: list[str] | None, tasks: str | None, max_turns: int | None = None) -> dict[str, Any]:
    """The options of an environment from the command line."""
    kwargs = key_values(options, option="--env-option")
    if "split" in kwargs:
        raise UsageError("give the split with --split, not as an --env-option")
    if tasks is not None:
        kwargs["tasks"] = tasks
    if max_turns is not None and "max_turns" in kwargs:
        raise UsageError("give the turn limit once, by --max-turns or by -E max_turns=N")
    if max_turns is not None:
        kwargs["max_turns"] = max_turns
    return kwargs
