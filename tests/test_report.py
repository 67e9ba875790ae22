"""The report: one file that asks for nothing from outside, whatever the log says."""

from __future__ import annotations

import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from agentgym.episode import Episode, RunConfig, RunWriter, TaskSetRecord, Turn
from agentgym.errors import DataError, UsageError
from agentgym.metrics import summarise
from agentgym.view.charts import turn_bins
from agentgym.view.report import write_report
from agentgym.view.table import run_table
from tests.test_metrics import config, episode

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7*7 }}{% raise %}\x00\u202e"


def write(run: Path, episodes: list[Episode], plan: RunConfig | None = None) -> Path:
    with RunWriter(run, plan or config(len(episodes))) as writer:
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
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_data(self, data: str) -> None:
        if "style" not in self.stack:
            self.text += data

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
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
    parser.close()
    assert parser.stack == []
    assert not re.search(r"<script|@import|url\(", page, re.IGNORECASE)
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
    assert page.count("<caption>") == len(parser.all("table"))
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


KINDS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)


def household_run(path: Path, skill: float, *, size: int = 200, tokens: bool = False) -> Path:
    """Tasks of six kinds with long transcripts, solved with about the probability `skill`; some attempts fault."""
    rng = random.Random(int(1000 * skill))
    episodes = []
    for i in range(size):
        solved = rng.random() < skill * (1 - 0.08 * (i % 6))
        length = rng.randint(6, 22) if solved else 50
        made = episode(i, "success" if solved else "failure", kind=KINDS[i % 6])
        made.usage = made.usage if tokens else {}
        made.turns = [
            Turn(
                observation=f"You arrive at drawer {t}. The drawer {t} is open. In it, you see a saltshaker 1, a "
                f"dishsponge {t}, a spoon 3 and a butterknife 2. You have nothing in your hands.",
                completion=f"take dishsponge {t} from drawer {t}",
                valid=rng.random() < 0.5 + skill / 2,
                reward=1.0 if solved and t == length - 1 else 0.0,
            )
            for t in range(length)
        ]
        if i % 67 == 3:
            episodes.append(episode(i, "fault", turns=3, kind=KINDS[i % 6]))
            made.attempt = 1
        if i != 137:  # this one was lost for good
            episodes.append(made)
    return write(path, episodes, msgspec.structs.replace(config(size), name=path.name))


def report(tmp_path: Path, *runs: Path) -> str:
    return write_report(runs, tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_three_runs_side_by_side_are_complete_accessible_and_small(tmp_path: Path) -> None:
    skills = {"expert": 0.97, "scripted": 0.6, "random": 0.03}
    text = report(tmp_path, *(household_run(tmp_path / name, skill) for name, skill in skills.items()))
    page = parse(text)
    assert len(text.encode()) < 300_000
    assert page.suspects == []
    for part in ("Success by kind", "Paired comparison", "Faults", "killed", "pick two obj and place", "dddddddddddd"):
        assert part in page.text
    assert len(page.all("svg")) == 3
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in page.all("svg"))
    assert len(page.all("caption")) == len(page.all("table")) == 7
    assert all(header.get("scope") in ("row", "col") for header in page.all("th"))
    assert len(page.all("details")) > 20
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_same_runs_give_the_same_page(tmp_path: Path) -> None:
    run = household_run(tmp_path / "run", 0.5, size=12)
    assert report(tmp_path, run) == report(tmp_path, run)


def test_every_kind_has_its_first_failure_and_first_success(tmp_path: Path) -> None:
    outcomes = [("odd", "failure"), ("even", "success"), ("odd", "failure"), ("odd", "success")]
    run = [episode(i, outcome, kind=kind) for i, (kind, outcome) in enumerate(outcomes)]
    found = re.findall(r"<summary><b class=\"(\w+)\">.*?(t\d)#", report(tmp_path, write(tmp_path / "run", run)))
    assert found == [("success", "t1"), ("failure", "t0"), ("success", "t3")]


def test_transcripts_show_observation_action_and_reward_and_are_cut(tmp_path: Path) -> None:
    turns = [Turn(observation=f"room {i}.", completion=f"<a>{i}</a>", action=f"go {i}", reward=0.5) for i in range(90)]
    turns[1] = Turn(observation="start" + "x" * 5000 + "finish", completion="what", valid=False)
    made = msgspec.structs.replace(episode(0, "failure"), turns=turns, final_observation="The end.")
    text = parse(report(tmp_path, write(tmp_path / "run", [made]))).text
    for part in ("room 0.", "<a>0</a>", "action go 0, reward 0.5", "reward 0, not valid", "30 turns are left out"):
        assert part in text
    for part in ("startx", "xxx [... 4311 characters ...] xxx", "xfinish", "room 89.", "The end."):
        assert part in text
    assert "room 50." not in text


def test_hostile_configurations_and_folders_are_only_text(tmp_path: Path) -> None:
    clean = HOSTILE.replace("\x00", "")
    fields: dict[str, Any] = dict.fromkeys(("name", "env", "split", "created"), clean)
    fields |= {"policies": {clean: {"spec": clean}}, "versions": {"x": clean}}
    record = TaskSetRecord(name=clean, version=clean, digest=clean, licence=clean)
    plan = msgspec.structs.replace(config(1), task_set=record, **fields)
    made = episode(0, "failure", kind=HOSTILE + "\x1b[31m")
    made.turns = [Turn(observation="", completion="", action=HOSTILE, role=HOSTILE)]
    folders = tmp_path / "a\"'><img src=x onerror=alert(1)><script>alert(1)<", tmp_path / "other"
    text = report(tmp_path, *(write(folder, [made], plan) for folder in folders))
    assert parse(text).suspects == []
    assert "<img src=x onerror=alert(1)>" in parse(text).text
    assert not re.search("[\x00\x1b\u202e]", text)


def test_more_runs_than_colours_and_the_same_run_again(tmp_path: Path) -> None:
    run = household_run(tmp_path / "run", 0.5, size=12)
    assert "(8)" in parse(report(tmp_path, *[run] * 8)).text
    with pytest.raises(UsageError, match="at least one run"):
        report(tmp_path)


def test_runs_of_different_task_sets_are_not_compared(tmp_path: Path) -> None:
    other = TaskSetRecord(name="t/set", version="2", digest="f" * 64)
    plans = config(1), msgspec.structs.replace(config(1), task_set=other)
    runs = [write(tmp_path / plan.task_set.version, [episode(0, "success")], plan) for plan in plans]
    assert "No paired comparison" in report(tmp_path, *runs)
    assert "No paired comparison" not in report(tmp_path, runs[0], runs[0])


def test_repeats_are_reported_as_pass_at_k(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [episode(0, "success"), episode(0, "failure", repeat=1)], config(1, 2))
    text = re.sub(r"\s+", " ", parse(report(tmp_path, run)).text)
    assert "pass^k: all are solved 150.0%50.0% 2100.0%0.0%" in text


def test_turn_bins_hold_the_numbers_of_both_charts() -> None:
    lengths = {"success": (3, 12), "failure": (20,), "unknown": (0,), "fault": (50,)}
    run = [episode(n, outcome, turns=n) for outcome, several in lengths.items() for n in several]
    bins = turn_bins({"run": run, "empty": []})
    assert [each.label for each in bins] == [f"{low}-{low + 1}" for low in range(1, 20, 2)]
    assert [each.ended[0] for each in bins] == [0.25, 0.25, 0, 0, 0, 0.25, 0, 0, 0, 0.25]
    assert [each.solved[0] for each in bins] == pytest.approx([0] + [1 / 3] * 4 + [2 / 3] * 5)
    assert {each.ended[1] for each in bins} == {each.solved[1] for each in bins} == {None}
