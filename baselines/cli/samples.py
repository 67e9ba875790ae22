"""`agentgym samples`: the token samples of a run as a Parquet table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentgym.cli.options import RunArgument, key_values


def samples(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Parquet file to write.")] = Path("samples.parquet"),
    method: Annotated[str, typer.Option("--method", "-m", help="Whose advantages to reckon: grpo, gigpo ...")] = "grpo",
    option: Annotated[
        list[str] | None, typer.Option("--option", "-O", metavar="KEY=VALUE", help="Option of the method.")
    ] = None,
) -> None:
    """Exports samples (token ids, masks, log-probabilities, advantages) for verl, SkyRL and other trainers."""
    from agentgym.baselines.core.export import export_samples
    from agentgym.baselines.core.method import make_method

    made = make_method(method, key_values(option, option="--option"))
    rows = export_samples(run, out, made)
    typer.echo(f"{rows} samples in {out}")
