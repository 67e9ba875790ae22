"""`agentgym show`: tables, report and transcripts of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from agentgym.episode import Episode, final_episodes, read_config, read_episodes
from agentgym.errors import UsageError, choices
from agentgym.metrics import compare, summarise
from agentgym.view.report import write_report
from agentgym.view.table import compare_table, plain, run_table


def show(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    html: Annotated[
        Path | None, typer.Option(help="Where to write the HTML report. [default: report.html in the first run]")
    ] = None,
    episode: Annotated[
        str | None, typer.Option(help="Print this episode's transcript (its id, or a part of it).")
    ] = None,
) -> None:
    """Prints a table per kind with intervals and writes a self-contained HTML report; several runs are compared."""
    console = Console()

    def notice(text: str) -> None:
        console.print(f"[yellow]note:[/] {escape(text)}", soft_wrap=True, highlight=False)

    loaded = [(read_config(run), read_episodes(run, notice=notice)) for run in runs]
    if episode is not None:
        console.print(_transcript(_find(episode, [e for _, episodes in loaded for e in episodes])))
        return
    for config, episodes in loaded:
        console.print(run_table(summarise(episodes, config), config))
    for config, episodes in loaded[1:]:
        first, first_episodes = loaded[0]
        comparison = compare(final_episodes(first_episodes), final_episodes(episodes))
        console.print(compare_table(comparison, first.name, config.name))
    written = write_report(runs, html or runs[0] / "report.html")
    console.print(f"Report: {written}", highlight=False, soft_wrap=True)


def _find(name: str, episodes: list[Episode]) -> Episode:
    matches = [e for e in episodes if e.episode_id == name] or [e for e in episodes if name and name in e.episode_id]
    if not matches:
        raise choices("episode", name, [e.episode_id for e in episodes])
    several = sorted({e.episode_id for e in matches})
    if len(several) > 1:
        raise UsageError(
            f"{name!r} names {len(several)} episodes, such as {several[0]} and {several[1]}; give more of the id"
        )
    return matches[-1]


def _transcript(episode: Episode) -> Group:
    parts: list[Panel | Text] = [Text(f"{episode.episode_id}  {episode.outcome} ({episode.cause})", style="bold")]
    for index, turn in enumerate(episode.turns):
        parts.append(
            Panel(Text(plain(turn.observation)), title=f"turn {index}", title_align="left", border_style="dim")
        )
        mark = "" if turn.valid else "  (not valid)"
        parts.append(
            Text(f"{plain(turn.role)}> {plain(turn.completion)}", style="bold green" if turn.valid else "bold red")
        )
        parts.append(Text(f"reward {turn.reward:g}{mark}", style="dim"))
    parts.append(Panel(Text(plain(episode.final_observation or episode.message)), title="end", title_align="left"))
    return Group(*parts)
