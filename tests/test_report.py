"""The report: one file that asks for nothing from outside, whatever the log says."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from agentgym.episode import Episode, RunWriter
from agentgym.errors import DataError
from agentgym.metrics import summarise
from agentgym.view.report import write_report
from agentgym.view.table import run_table
from tests.test_metrics import config, episode

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7*7 }}{% raise %}\x00\u202e"


def write(run: Path, episodes: list[Episode]) -> Path:
    with RunWriter(run, config(len(episodes))) as writer:
        for item in episodes:
            writer.append(item)
    return run


class Balanced(HTMLParser):
    """Fails on tags that are closed in the wrong order, and collects what could load or run something."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "rect", "path", "circle", "line"})

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.suspects: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.suspects += [
            f"{tag} {k}={v}" for k, v in attrs if k.startswith("on") or k in ("src", "href", "xlink:href")
        ]
        if tag in ("script", "link", "iframe", "img", "object"):
            self.suspects.append(tag)
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.stack.pop() == tag


def parse(page: str) -> Balanced:
    parser = Balanced()
    parser.feed(page)
    assert parser.stack == []
    return parser


def test_the_report_is_self_contained(tmp_path: Path) -> None:
    runs = [write(tmp_path / name, [episode(i, "success" if i % 3 else "failure") for i in range(12)]) for name in "ab"]
    page = write_report(runs, tmp_path / "report.html").read_text()
    parser = parse(page)
    assert parser.suspects == []
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert "http://" not in without_namespaces
    assert "https://" not in without_namespaces
    assert 'aria-label="Success rate' in page
    assert page.count("<caption>") == page.count("<table>")
    assert "66.7% [39, 86]" in page


def test_hostile_text_is_only_text(tmp_path: Path) -> None:
    bad = episode(0, "failure", kind=HOSTILE)
    bad.turns[0].observation = bad.turns[1].completion = bad.final_observation = HOSTILE
    bad.task_id = bad.episode_id = HOSTILE
    fault = episode(1, "fault")
    fault.message = fault.cause = HOSTILE
    page = write_report([write(tmp_path / "run", [bad, fault])], tmp_path / "report.html").read_text()
    parser = parse(page)
    assert parser.suspects == []
    assert "<script" not in page
    assert "49" not in re.findall(r"alert\(1\)[^<]{0,40}", page)[0]


@pytest.mark.parametrize("episodes", [[], [episode(0, "fault")], [episode(0, "unknown")]])
def test_runs_with_nothing_to_show(tmp_path: Path, episodes: list[Episode]) -> None:
    run = write(tmp_path / "run", episodes)
    parse(write_report([run, run], tmp_path / "report.html").read_text())


def test_the_table_fits_eighty_columns(tmp_path: Path) -> None:
    kinds = ["pick_clean_then_place_in_recep", "look_at_obj_in_light"]
    run = [episode(i, "success" if i % 2 else "failure", kind=kinds[i % 2]) for i in range(20)]
    for item in run:
        item.usage = {}
    console = Console(width=80, record=True)
    console.print(run_table(summarise(run, config(20)), config(20)))
    text = console.export_text()
    assert "faults" in text
    assert re.search(r"all +20 +50.0% \[30, 70\] +2.0 +50.0% +0", text), text


def test_a_damaged_run_is_named(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [episode(0, "success"), episode(1, "success")])
    log = run / "episodes.jsonl"
    log.write_bytes(b"{}\n" + log.read_bytes())
    with pytest.raises(DataError, match="line 1 is damaged"):
        write_report([run], tmp_path / "report.html")
