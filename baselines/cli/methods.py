"""`agentgym methods`: what can be trained with, and where it comes from."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table


def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method with all its options.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Lists the training methods with paper, grade, families and what they use of the trainer."""
    from agentgym.baselines.core.method import find_method, list_methods

    console = Console()
    kinds = [find_method(known) for known in ([name] if name else list_methods())]
    if json:
        cards = [{**msgspec.to_builtins(kind.card), "label": kind.card.label} for kind in kinds]
        typer.echo(msgspec.json.format(msgspec.json.encode(cards if name is None else cards[0])).decode())
        return
    if name is not None:
        [kind] = kinds
        card = kind.card
        console.print(f"[bold]{card.title}[/]  ({card.name})", highlight=False)
        for what, text in (
            ("Paper", card.paper),
            ("Grade", f"{card.grade}: {card.label} ({card.source})"),
            ("Result", card.result),
            ("Families", ", ".join(card.families)),
            ("Uses", ", ".join(card.hooks) or "the defaults"),
            ("Differences", "; ".join(card.differences) or "none known"),
            ("Presets", ", ".join(getattr(kind, "PRESETS", {})) or "none"),
        ):
            console.print(f"{what:12} {text}", highlight=False)
        table = Table("Option", "Default")
        for field in msgspec.structs.fields(kind.Config):
            table.add_row(field.name, repr(field.default))
        console.print(table)
        console.print(f"Train with: agentgym train --method {card.name} --option NAME=VALUE ...", highlight=False)
        return
    table = Table("Method", "Paper", "Grade", "Label", "Families", "Uses", title="Training methods")
    for kind in kinds:
        card = kind.card
        table.add_row(
            card.name, card.paper, card.grade, card.label, ", ".join(card.families), ", ".join(card.hooks) or "-"
        )
    console.print(table)
    console.print("No paper's result was run at its scale. Details: agentgym methods NAME", highlight=False)
