"""The command line: every command works, and every bad input is one message that names the mend, exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import agentgym


def agentgym_cli(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    code = "import tests.worlds; from agentgym.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        input=stdin,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "COLUMNS": "120"},
        check=False,
    )


def run(*arguments: str | Path) -> str:
    done = agentgym_cli(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "expert"
    tasks = ("--tasks", "alfworld/generated:s")
    text = run("eval", "-e", "alfworld", "-p", "expert", "-n", "12", *tasks, "--out", out, "--workers", "2")
    assert "100.0%" in text
    return out


def test_help_names_every_command() -> None:
    text = run("--help")
    for command in ("list", "check", "play", "eval", "replay", "show", "data"):
        assert command in text
        assert "Usage" in run(command, "--help")
    assert run("--version").strip() == f"agentgym {agentgym.__version__}"


def test_list() -> None:
    assert "agentgym/ALFWorld-v0" in run("list")
    everything = json.loads(run("list", "--json"))
    assert "agentgym/ALFWorld-v0" in [env["id"] for env in everything["environments"]]
    assert {"random", "scripted", "expert"} <= set(everything["policies"])


def test_a_run_is_shown_replayed_and_reported(evaluated: Path) -> None:
    assert (evaluated / "summary.json").exists()
    assert (evaluated / "report.html").exists()
    assert "12 episodes re-stepped, 0 differ" in run("replay", evaluated, "--workers", "2")
    text = run("show", evaluated, evaluated)
    assert "paired by episode" in text
    assert "report.html" in text
    assert "You arrive at" in run("show", evaluated, "--episode", "000003")


def test_a_changed_log_is_found_by_replay(evaluated: Path, tmp_path: Path) -> None:
    log = evaluated / "episodes.jsonl"
    whole = log.read_text()
    try:
        log.write_text(whole.replace('"reward":1.0', '"reward":2.0', 1))
        done = agentgym_cli("replay", evaluated)
        assert done.returncode == 1
        assert "reward was 2.0, re-stepping gives 1.0" in done.stdout
    finally:
        log.write_text(whole)


def test_check_and_data(tmp_path: Path) -> None:
    assert "0 findings" in run("check", "alfworld", "--tasks", "alfworld/generated:xs")
    assert "alfworld" in run("data", "list")
    run("data", "export", "alfworld/generated:xs", "--count", "3", "--to", tmp_path / "games")
    assert len(list((tmp_path / "games").rglob("game.tw-pddl"))) == 3
    run(
        "eval",
        "-e",
        "alfworld",
        "-p",
        "expert",
        "--tasks",
        tmp_path / "games",
        "--no-report",
        "--out",
        tmp_path / "run",
    )


def test_a_policy_that_lacks_what_it_needs_says_so(tmp_path: Path) -> None:
    done = agentgym_cli("eval", "-e", "alfworld", "-p", "expert:x", "--out", tmp_path / "a")
    assert done.returncode == 2
    assert "takes no argument" in done.stderr


def write_game(folder: Path, content: bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / "game.tw-pddl").write_bytes(content)
    (folder / "traj_data.json").write_text('{"task_type": "pick_and_place_simple", "pddl_params": {}}')
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "-e", "alfwrold"], "Did you mean 'alfworld'"),
        (["eval", "-e", "alfworld", "--split", "tets"], "unknown split of alfworld/generated"),
        (["eval", "-e", "alfworld", "-E", "max_turn=3"], "Did you mean 'max_turns'"),
        (["eval", "-e", "alfworld", "-E", "max_turns"], "takes KEY=VALUE"),
        (["eval", "-e", "alfworld", "-E", "backend=native2"], "Did you mean 'native'"),
        (["eval", "-e", "alfworld", "-p", "exprt"], "Did you mean 'expert'"),
        (["eval", "-e", "alfworld", "-p", "random", "-P", "x=1"], "unexpected keyword argument 'x'"),
        (["eval", "-e", "alfworld", "--backend", "procs"], "unknown back end"),
        (["eval", "-e", "alfworld", "--tasks", "alfworld/generated:huge"], "unknown size"),
        (["eval", "-e", "alfworld", "--tasks", "alfworld/gnerated"], "Did you mean 'alfworld/generated'"),
        (["eval", "-e", "alfworld", "-n", "100000"], "lower --episodes or raise --repeats"),
        (["eval", "--resume", "nowhere"], "no such file"),
        (["show", "nowhere"], "no such file"),
        (["replay", "nowhere"], "no such file"),
        (["check", "nothing"], "unknown environment"),
        (["play", "nothing"], "unknown environment"),
        (["data", "fetch", "alfwrld"], "Did you mean 'alfworld'"),
        (["data", "fetch", "alfworld", "--from", "nowhere"], "nowhere"),
        (["data", "export", "alfworld/generated:xs", "--count", "501", "--to", "x"], "lower --count"),
    ],
)
def test_a_bad_call_is_one_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    extra = ["--out", str(tmp_path / "run")] if arguments[0] == "eval" and "--resume" not in arguments else []
    if arguments[0] == "eval" and not {"-n", "--resume"} & set(arguments):
        extra += ["-n", "2"]
    done = agentgym_cli(*arguments, *extra)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert message in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "game.tw-pddl"),
        (b'{"pddl_domain": "(define', "game.tw-pddl"),
        (b'{"pddl_domain": "", "grammar": "", "pddl_problem": "(define", "solvable": true}', "game.tw-pddl"),
        (b"\xff\xfe\x00", "game.tw-pddl"),
    ],
)
def test_damaged_games_are_named(content: bytes, problem: str, tmp_path: Path) -> None:
    folder = write_game(tmp_path / "games" / "valid_seen" / "task" / "trial", content)
    done = agentgym_cli(
        "eval", "-e", "alfworld", "-n", "1", "--split", "valid_seen", "--tasks", folder, "--out", tmp_path / "run"
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert problem in done.stderr.replace("\n", "")
    assert "Traceback" not in done.stderr


def test_a_folder_without_games_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = agentgym_cli("eval", "-e", "alfworld", "-n", "1", "--tasks", tmp_path / "empty", "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "game.tw-pddl" in done.stderr
