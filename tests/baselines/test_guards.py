"""What is refused before, during and after an iteration, and that nothing is lost by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.errors import AgentGymError, UsageError
from tests.shared_data import need

need("torch")

Make = Callable[..., Any]


def test_two_trainings_cannot_have_one_folder(small: Make, tmp_path: Path) -> None:
    from agentgym.baselines.core.record import lock
    from agentgym.baselines.core.trainer import train

    train(small(iterations=1), tmp_path / "run")
    with lock(tmp_path / "run"), pytest.raises(UsageError, match="another training"):
        train(small(iterations=2), tmp_path / "run", resume=True)
    assert train(small(iterations=2), tmp_path / "run", resume=True)["iteration"] == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"evaluation": {"split": "nope"}}, "nope"),
        ({"lora": {"rank": 2, "targets": ["absent"]}}, "lora.targets"),
        ({"optimiser": {"lr": float("inf")}}, "optimiser.lr"),
        ({"model": "/absent"}, "no causal language model"),
    ],
)
def test_a_start_that_fails_leaves_the_folder_free(
    wrong: dict[str, Any], said: str, small: Make, tmp_path: Path
) -> None:
    from agentgym.baselines.core.trainer import train

    with pytest.raises(AgentGymError, match=said):
        train(small(iterations=1, **wrong), tmp_path / "run")
    assert train(small(iterations=1), tmp_path / "run")["state"] == "finished"


def test_an_update_that_breaks_the_weights_is_seen_behind_it(small: Make, tmp_path: Path) -> None:
    from agentgym.baselines.core.learner import Diverged
    from agentgym.baselines.core.trainer import train

    # One step an iteration: the ratios of the step itself are all 1.
    changes = {"minibatch": 0, "guard": {"max_kl": 0.5}, "optimiser": {"lr": 3.0, "clip": 100.0}}
    with pytest.raises(Diverged, match=r"guard\.max_kl"):
        train(small(iterations=2, checkpoint_every=1, **changes), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "stopped"


def test_a_trained_model_is_played_as_it_was_trained(small: Make, tmp_path: Path) -> None:
    from agentgym.baselines.core.trainer import train
    from agentgym.policies.base import make_policy

    train(small(iterations=1), tmp_path / "run")
    policy = make_policy(f"hf:{tmp_path / 'run' / 'model'}")
    said = policy.describe()
    assert said["max_new_tokens"] == 4
    assert said["instructions"] is False
    assert make_policy(f"hf:{tmp_path / 'run' / 'model'}", max_new_tokens=9).describe()["max_new_tokens"] == 9


def hook(**hooks: Any) -> str:
    """A method with some hooks replaced, as `--method module:Class` names it."""
    from agentgym.baselines.methods.grpo import GRPO

    globals()["Wrong"] = type("Wrong", (GRPO,), hooks)
    return "tests.baselines.test_guards:Wrong"


def spoil(self: Any, trajectories: Any, services: Any) -> None:
    trajectories[0].rewards[0] = float("nan")


def twice(self: Any, tasks: Any, iteration: int, round: int = 0) -> Any:
    from agentgym.baselines.core.method import group_specs

    return group_specs(tasks, 2, iteration, round) * 2


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        ({"rewards": spoil}, "`rewards` left .* with nan at turn 0"),
        ({"plan": twice}, "`plan` names the episode .* twice"),
        ({"keep": lambda self, groups: None}, "`keep` returned None"),
        ({"after": lambda self, iteration, trajectories: None}, "`after` returned None"),
        ({"after": lambda self, iteration, trajectories: {"success": 1.0}}, "success"),
        ({"turn_advantages": lambda self, trajectories: [0.0] * len(trajectories)}, "`turn_advantages` gave"),
        ({"turn_advantages": lambda self, trajectories: []}, "one array for each"),
        ({"state": lambda self: {"it": object()}}, "cannot be saved"),
    ],
)
def test_hooks_that_go_wrong_are_named(hooks: dict[str, Any], said: str, small: Make, tmp_path: Path) -> None:
    from agentgym.baselines.core.trainer import train

    with pytest.raises(UsageError, match=said):
        train(small(iterations=1, method=hook(**hooks)), tmp_path / "run")
