"""`agentgym list`: what there is."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from agentgym.policies.base import list_policies
from agentgym.registry import data_cards, env_cards, task_cards


def list_everything(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Lists environments, task sets, official data and policies, plug-ins included."""
    envs, tasks, data, policies = env_cards(), task_cards(), data_cards(), list_policies()
    if as_json:
        everything: dict[str, Any] = {"environments": envs, "task_sets": tasks, "data": data, "policies": policies}
        typer.echo(msgspec.json.format(msgspec.json.encode(everything)).decode())
        return
    console = Console()
    table = Table(title="Environments", title_justify="left")
    for column in ("family", "id", "what"):
        table.add_column(column, overflow="fold")
    for env in envs:
        table.add_row(env.family, env.id, env.summary or env.title)
    console.print(table)
    table = Table(title="Task sets (--tasks)", title_justify="left")
    for column in ("name", "what", "licence", "offline"):
        table.add_column(column, overflow="fold")
    for card in task_cards():
        table.add_row(card.name, card.title, card.licence, "yes" if card.offline else "no")
    console.print(table)
    if data:
        table = Table(title="Official data (agentgym data fetch NAME)", title_justify="left")
        for column in ("name", "what", "licence", "size"):
            table.add_column(column, overflow="fold")
        for item in data:
            table.add_row(item.name, item.title, item.licence, item.size)
        console.print(table)
    console.print("Policies (--policy): " + ", ".join(policies) + ", or package.module:make", highlight=False)
