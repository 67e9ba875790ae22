"""The commands of the trainer: what they print, refuse and leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import agentgym.cli
from agentgym.baselines.core.method import list_methods
from agentgym.errors import UsageError

RUNNER = CliRunner()


def run(*arguments: str) -> str:
    result = RUNNER.invoke(agentgym.cli.app, list(arguments), catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_methods_lists_every_method_with_its_label() -> None:
    cards = json.loads(run("methods", "--json"))
    assert [card["name"] for card in cards] == list_methods()
    assert all(card["result"] == "not run at paper scale" for card in cards)
    assert {card["label"] for card in cards} <= {
        "standard algorithm",
        "formulas follow the official code or paper",
        "formulas follow third-party notes or code",
        "inspired by",
    }


def test_one_method_shows_its_options() -> None:
    shown = run("methods", "gigpo")
    assert "step_weight" in shown
    assert "verl-agent" in shown
    with pytest.raises(UsageError, match="gigpo"):
        run("methods", "gigpoo")


def test_train_trains_resumes_and_refuses(tmp_path: Path) -> None:
    from tests.shared_data import need

    need("torch")
    out = tmp_path / "run"
    small = ["--set", "slots=8", "--set", "tiny.episodes=8", "--set", "evaluation.every=0"]
    shape = ["--set", "evaluation.final=4", "--set", "tasks_per_iteration=4", "--set", "tiny.hidden=16"]
    small += ["--set", "prompt.admissible=false"]
    run("train", "-m", "sft", "--tasks", "alfworld/generated:xs", "--iterations", "1", "-o", str(out), *small, *shape)
    assert (out / "model" / "config.json").is_file()
    assert json.loads((out / "status.json").read_text())["state"] == "finished"
    with pytest.raises(UsageError, match="--resume"):
        run("train", "-m", "sft", "--tasks", "alfworld/generated:xs", "-o", str(out), *small)
    with pytest.raises(UsageError, match="leave the other options out"):
        run("train", "--resume", str(out), "--iterations", "2")
    assert "Held out" in run("train", "--resume", str(out))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--method", "grp"], "grpo"),
        (["--option", "group_siz=4"], "group_size"),
        (["--set", "optimiser.learning_rate=1"], "learning_rate"),
        (["--set", "iteration=1"], "iterations"),
        (["--set", "nonsense"], "KEY=VALUE"),
        (["--config", "absent.toml"], "no such file"),
        (["--method", "opd"], "teacher"),
    ],
)
def test_bad_calls_say_how_to_mend_them(arguments: list[str], said: str, tmp_path: Path) -> None:
    from tests.shared_data import need

    need("torch")
    from agentgym.errors import AgentGymError

    with pytest.raises(AgentGymError, match=said):
        run("train", "--tasks", "alfworld/generated:xs", "--out", str(tmp_path / "run"), *arguments)
    assert not (tmp_path / "run").exists()
