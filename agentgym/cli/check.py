"""`agentgym check`: does an environment keep the contract?"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from agentgym.cli.options import EnvOptions, Tasks, env_kwargs


def check(
    env: Annotated[str, typer.Argument(metavar="ID", help="Environment id or family name.")],
    tasks: Tasks = None,
    env_option: EnvOptions = None,
) -> None:
    """Checks an environment against the contract, Gymnasium's and ours; exit code 1 if it is broken."""
    from agentgym.checker import check_env_id

    report = check_env_id(env, **env_kwargs(env_option, tasks))
    console = Console(highlight=False, soft_wrap=True)
    failed = {finding.check for finding in report.findings}
    for name, meaning in report.passed:
        if name not in failed:
            console.print(f"[green]ok[/]      {escape(name)}: {escape(meaning)}")
    for finding in report.findings:
        console.print(f"[bold red]broken[/]  {escape(finding.check)}: {escape(finding.message)}")
        console.print(f"        {escape(finding.mend)}")
    console.print(f"{report.env}: {len(report.findings)} findings")
    if report.findings:
        raise typer.Exit(1)
