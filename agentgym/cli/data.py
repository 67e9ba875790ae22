"""`agentgym data`: official data, fetched by whoever has a network or a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from agentgym.errors import UsageError, choices
from agentgym.paths import data_dir
from agentgym.registry import DataCard, data_cards, load_entry_point, make_task_set
from agentgym.task import TaskSet, resolve_split

app = typer.Typer(help="Official data of the benchmarks.", no_args_is_help=True)


@app.command("list")
def list_data() -> None:
    """Lists the official data sets and where they would be kept."""
    table = Table(title=f"Official data, kept in {data_dir()}", title_justify="left")
    for column in ("name", "what", "licence", "size", "here"):
        table.add_column(column, overflow="fold")
    for card in data_cards():
        table.add_row(
            card.name, card.title, card.licence, card.size, "yes" if (data_dir() / card.name).exists() else "no"
        )
    Console().print(table)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Name of the data set, see agentgym data list.")],
    source: Annotated[
        Path | None, typer.Option("--from", help="Take an existing folder instead of downloading.", metavar="DIR")
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--to", help="Folder to keep it in. [default: see agentgym data list]")
    ] = None,
) -> None:
    """Downloads official data, continuing where an earlier try stopped, and checks it; or takes --from DIR."""
    card = find_data(name)
    console = Console(highlight=False)
    console.print(f"{escape(card.title)}: licence {escape(card.licence)}", soft_wrap=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        rows: dict[str, TaskID] = {}

        def report(label: str, done: int, total: int | None) -> None:
            if label not in rows:
                rows[label] = progress.add_task(label, total=total)
            progress.update(rows[label], completed=done, total=total)

        message = load_entry_point(card.entry_point)(target or data_dir() / name, source_dir=source, progress=report)
    console.print(escape(str(message)), soft_wrap=True)


@app.command()
def export(
    tasks: Annotated[str, typer.Argument(help="Task set, such as alfworld/generated:s.")],
    to: Annotated[Path, typer.Option("--to", help="Folder to write into; must not hold anything yet.")],
    split: Annotated[str, typer.Option(help="Split of the task set.")] = "test",
    count: Annotated[int, typer.Option(min=1, help="Number of tasks, from the first on.")] = 100,
) -> None:
    """Writes the files of tasks in the benchmark's own format, for other software or for --tasks DIR."""
    task_set = make_task_set(tasks)
    split = resolve_split(task_set, split)
    export_tasks(task_set, split, count, to)
    Console(highlight=False).print(
        f"{count} tasks of {escape(task_set.name)} ({split}) written to {to}", soft_wrap=True
    )


def export_tasks(tasks: TaskSet, split: str, count: int, to: Path) -> None:
    """Writes the first `count` tasks of a split: to/SPLIT/PATH/FILE, PATH being the task's `data["path"]` or its id.

    Raises:
        UsageError: if the split is too small, its tasks have no files, or the folder is not empty.
    """
    if not 0 < count <= tasks.splits[split]:
        raise UsageError(f"split {split!r} of {tasks.name} has {tasks.splits[split]} tasks, not {count}; lower --count")
    if to.exists() and any(to.iterdir()):
        raise UsageError(f"{to} is not empty; choose another folder")
    for index in range(count):
        task = tasks.at(split, index)
        if not task.files:
            raise UsageError(f"tasks of {tasks.name} have no files to export")
        folder = to / split / str(task.data.get("path", task.id))
        for name in task.files:
            if not (folder / name).resolve().is_relative_to(to.resolve()) or (folder / name).exists():
                raise UsageError(f"task {task.id!r} would be written to {folder / name}, outside {to} or over another")
        folder.mkdir(parents=True, exist_ok=True)
        for name in task.files:
            (folder / name).write_bytes(tasks.open(task, name))


def find_data(name: str) -> DataCard:
    """The card of a data set.

    Raises:
        UsageError: if there is none of that name.
    """
    for card in data_cards():
        if card.name == name:
            return card
    raise choices("data set", name, [card.name for card in data_cards()])
