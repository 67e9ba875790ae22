"""The report of one or several runs: one HTML file that needs no network, no server and no script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2

from agentgym.episode import Episode, RunConfig, final_episodes, read_config, read_episodes, write_atomically
from agentgym.errors import UsageError
from agentgym.metrics import Comparison, Summary, compare, summarise
from agentgym.view.charts import COLOURS, solved_within, success_by_kind, turn_bins, turns_histogram
from agentgym.view.table import number, percent, plain

_SAMPLES = 36  # sample episodes of a report
_TEXT = 120_000  # characters of all sample transcripts together
_MOST_TURNS = 60  # shown turns of a sample episode; fewer where there are many samples
_MOST_TEXT = 700  # shown characters of one text


class _Run(NamedTuple):
    """A run as the template sees it."""

    label: str
    config: RunConfig
    episodes: list[Episode]
    summary: Summary
    samples: list[Episode]

    @property
    def policies(self) -> str:
        """Policies, with their role where they have one."""
        items = self.config.policies.items()
        return ", ".join(("" if role == "*" else f"{role}: ") + str(p.get("spec", "?")) for role, p in items) or "?"

    @property
    def versions(self) -> str:
        """Versions of the packages that matter."""
        return ", ".join(f"{package} {version}" for package, version in self.config.versions.items()) or "?"


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Writes the report.

    Args:
        runs: run directories; the first one is what the others are compared with.
        out: the HTML file.

    Returns:
        `out`.

    Raises:
        UsageError: if `runs` is empty.
        DataError: if a run is damaged or `out` cannot be written.
    """
    if not runs:
        raise UsageError("a report needs at least one run; give the folder that `agentgym eval` printed")
    most = max(2, _SAMPLES // len(runs))
    loaded = [_load(path, label, most) for path, label in zip(runs, _labels(runs), strict=True)]
    episodes = {run.label: run.episodes for run in loaded}
    bins = turn_bins(episodes)
    samples = sum(len(run.samples) for run in loaded)
    shown_turns = max(12, min(_MOST_TURNS, 4 * _MOST_TURNS // max(1, samples)))
    shown = sum(min(shown_turns, len(e.turns)) for run in loaded for e in run.samples)
    limit = max(80, min(_MOST_TEXT, _TEXT // max(1, shown)))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        percent=percent, number=number, share=_share, plain=plain, cut=lambda text: _cut(text, limit)
    )
    page = environment.get_template("report.html.j2").render(
        runs=loaded,
        colours=COLOURS,
        comparisons=_comparisons(loaded),
        bins=bins,
        success_chart=success_by_kind({run.label: run.summary for run in loaded}),
        solved_chart=solved_within(episodes),
        turns_chart=turns_histogram(bins, len(loaded)),
        head=shown_turns - shown_turns // 3,
        tail=shown_turns // 3,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page.encode("utf-8", "replace"))
    return out


def _load(path: Path, label: str, most_samples: int) -> _Run:
    config, attempts = read_config(path), read_episodes(path)
    episodes = final_episodes(attempts)
    return _Run(label, config, episodes, summarise(attempts, config), _samples(episodes, most_samples))


def _labels(runs: Sequence[Path]) -> list[str]:
    """Folder names, or whole paths where those are not unique; a run that is given twice is numbered."""
    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run) for run in runs]
    seen: list[str] = []
    for name in map(plain, names):
        seen.append(name if name not in seen else f"{name} ({len(seen) + 1})")
    return seen


def _comparisons(runs: Sequence[_Run]) -> list[tuple[_Run, Comparison]]:
    """The later runs against the first, where they played the same tasks of the same task set."""
    first = runs[0]
    same = [
        run
        for run in runs[1:]
        if (run.config.env, run.config.task_set.digest) == (first.config.env, first.config.task_set.digest)
    ]
    found = [(run, compare(first.episodes, run.episodes)) for run in same]
    return [(run, comparison) for run, comparison in found if comparison.pairs]


def _samples(episodes: Sequence[Episode], most: int) -> list[Episode]:
    """The first fault, then the first failure and the first success of each kind, as many as fit."""
    chosen: dict[tuple[str, str], Episode] = {}
    for outcome in ("fault", "failure", "success"):
        for episode in episodes:
            if episode.outcome == outcome:
                chosen.setdefault((outcome, "" if outcome == "fault" else episode.kind), episode)
    faults = [episode for (outcome, _), episode in chosen.items() if outcome == "fault"]
    rest = [episode for (outcome, _), episode in chosen.items() if outcome != "fault"]
    return (faults + sorted(rest, key=lambda episode: episode.kind))[:most]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _cut(text: str, limit: int) -> str:
    """The head and the tail of a long text."""
    shown = plain(text)
    if len(shown) <= limit:
        return shown
    tail = limit // 4
    return f"{shown[: limit - tail]} [... {len(shown) - limit} characters ...] {shown[-tail:]}"
