"""A small run of the trainer: the counting world, a tiny model, and a cold start that is made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shared_data import need

Lines = list[dict[str, Any]]

SMALL: dict[str, Any] = {
    "env": "test/Count-v0",
    "train_split": "test",
    "model": "tiny",
    "iterations": 3,
    "tasks_per_iteration": 4,
    "minibatch": 0,
    "max_new_tokens": 4,
    "slots": 16,
    "checkpoint_every": 1,
    "prompt": {"system": "", "instructions": False, "admissible": False},
    "tiny": {"hidden": 32, "layers": 2, "heads": 2, "feed_forward": 32, "episodes": 4},
    "evaluation": {"every": 0, "episodes": 4, "final": 4, "greedy": False},
    "method_options": {"group_size": 4},
}


def small_config(**changes: Any) -> Any:
    """A training configuration of a second's work; tables replace single entries."""
    import tests.baselines.odd
    import tests.worlds  # noqa: F401 - registers its environments
    from agentgym.baselines.core.config import make_train_config, merge

    base = SMALL
    if "method_options" in changes:
        base = {name: value for name, value in SMALL.items() if name != "method_options"}
    return make_train_config(merge(base, changes))


@pytest.fixture(scope="session")
def cold_start(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model that knows the words of the counting world and uses them at random."""
    need("torch")
    import torch

    from agentgym.baselines.core.trainer import train

    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("cold")
    config = small_config(
        method="sft",
        iterations=4,
        tasks_per_iteration=32,
        minibatch=4,
        method_options={},
        demonstrations={"noise": 0.4},
        optimiser={"lr": 3e-3},
    )
    train(config, out)
    return str((out / "model").resolve())


@pytest.fixture
def small(cold_start: str) -> Callable[..., Any]:
    """Makes a configuration that starts from the cold start."""

    def make(**changes: Any) -> Any:
        return small_config(**{"model": cold_start, **changes})

    return make


def lines_of(out: Path) -> Lines:
    """metrics.jsonl without what a clock says."""
    from agentgym.baselines.core.record import read_metrics

    clocks = {"seconds", "rollout_seconds", "evaluation_seconds", "tokens_per_second"}
    return [{key: value for key, value in line.items() if key not in clocks} for line in read_metrics(out)]
