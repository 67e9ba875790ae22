"""The report of one or several runs: one HTML file that needs no network, no server and no script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from agentgym.episode import Episode, RunConfig, final_episodes, read_config, read_episodes, write_atomically
from agentgym.metrics import Comparison, Summary, compare, summarise
from agentgym.view.charts import solved_within, success_by_kind
from agentgym.view.table import number, percent

_SHOWN_TURNS = 60
_SHOWN_TEXT = 700


class _Run:
    """A run as the template sees it."""

    def __init__(self, path: Path, label: str) -> None:
        self.path = path
        self.config: RunConfig = read_config(path)
        self.attempts = read_episodes(path)
        self.episodes = final_episodes(self.attempts)
        self.summary: Summary = summarise(self.attempts, self.config)
        self.label = label
        self.samples = _samples(self.episodes)

    @property
    def policies(self) -> str:
        """Role: policy, where the role says something."""
        items = self.config.policies.items()
        return ", ".join(
            str(r.get("spec", "?")) if role == "*" else f"{role}: {r.get('spec', '?')}" for role, r in items
        )


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Writes the report.

    Args:
        runs: run directories; the first one is what the others are compared with.
        out: the HTML file.

    Returns:
        `out`.

    Raises:
        DataError: if a run is damaged or `out` cannot be written.
    """
    loaded = [_Run(path, label) for path, label in zip(runs, _labels(runs), strict=True)]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=percent, number=number, cut=_cut)
    comparisons: list[tuple[_Run, Comparison]] = [
        (run, comparison) for run in loaded[1:] if (comparison := compare(loaded[0].episodes, run.episodes)).pairs
    ]
    page = environment.get_template("report.html.j2").render(
        runs=loaded,
        comparisons=comparisons,
        success_chart=success_by_kind({run.label: run.summary for run in loaded}),
        turns_chart=solved_within({run.label: run.episodes for run in loaded}),
        shown_turns=_SHOWN_TURNS,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page.encode("utf-8", "replace"))
    return out


def _labels(runs: Sequence[Path]) -> list[str]:
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def _samples(episodes: Sequence[Episode]) -> list[Episode]:
    """The first fault, failure and success of the run, and the longest success."""
    chosen: dict[str, Episode] = {}
    for outcome in ("fault", "failure", "success"):
        for episode in episodes:
            if episode.outcome == outcome:
                chosen.setdefault(episode.episode_id, episode)
                break
    solved = [episode for episode in episodes if episode.outcome == "success"]
    if solved:
        longest = max(solved, key=lambda episode: len(episode.turns))
        chosen.setdefault(longest.episode_id, longest)
    return list(chosen.values())


def _cut(text: Any, limit: int = _SHOWN_TEXT) -> str:
    shown = str(text)
    return shown if len(shown) <= limit else shown[:limit] + " ..."
