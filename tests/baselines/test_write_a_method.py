"""The method of the guide, used as the guide says: a file of its own, found by module:Class."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.baselines.conftest import lines_of
from tests.baselines.toy import toy_a, trajectory
from tests.shared_data import need

need("torch")

from agentgym.baselines.core import checkpoint as checkpoints  # noqa: E402
from agentgym.baselines.core.method import make_method  # noqa: E402
from agentgym.baselines.core.trainer import train  # noqa: E402
from agentgym.errors import UsageError  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "write-a-method.md"


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The guide's code as novelty.py in a folder that Python finds."""
    [code] = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(code.splitlines()) < 60
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "novelty.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "novelty", raising=False)
    return folder


def test_its_advantages_are_those_that_the_guide_promises(plugin: Path) -> None:
    trajectories = toy_a()
    plain = make_method("grpo").turn_advantages(trajectories)
    for weighted, advantage in zip(
        make_method("novelty:Novelty", {"power": 0}).turn_advantages(trajectories), plain, strict=True
    ):
        np.testing.assert_allclose(weighted, advantage)
    method: Any = make_method("novelty:Novelty", {"power": 1.0, "fade": 0.5})
    assert method.after(0, trajectories) == {"known_states": 3}
    assert method.visits == {"s0": 4, "s1": 3, "s2": 3}
    fresh = [trajectory([0.0, 1.0], states=["s0", "new"]), trajectory([0.0, 0.0], states=["s1", "s1"], number=1)]
    up, down = method.turn_advantages(fresh)
    # 1 / (1 + 4) and 1, scaled to mean 1, times +-1 / sqrt(2)
    np.testing.assert_allclose(up, np.sqrt(0.5) * np.array([1 / 3, 5 / 3]), rtol=1e-4)
    np.testing.assert_allclose(down, -np.sqrt(0.5) * np.ones(2), rtol=1e-4)
    method.after(1, fresh)
    assert method.visits == {"s0": 3, "s1": 3.5, "s2": 1.5, "new": 1}
    again: Any = make_method("novelty:Novelty")
    again.load_state(method.state())
    assert again.visits == method.visits


def test_it_trains_and_resumes_as_a_third_partys(plugin: Path, small: Callable[..., Any], tmp_path: Path) -> None:
    config = small(method="novelty:Novelty", method_options={"power": 0.3, "group_size": 4}, iterations=2)
    train(config, tmp_path / "whole")
    lines = [line for line in lines_of(tmp_path / "whole") if line["kind"] == "train"]
    assert [line["iteration"] for line in lines] == [1, 2]
    assert all(line["grad_norm"] > 0 and line["known_states"] > 1 for line in lines)

    def watch(line: dict[str, Any]) -> None:
        if line["kind"] == "progress" and line["iteration"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "broken", watch=watch)
    train(config, tmp_path / "broken", resume=True)
    assert lines_of(tmp_path / "broken") == lines_of(tmp_path / "whole")
    state = checkpoints.load_state(checkpoints.list_checkpoints(tmp_path / "broken")[-1])
    assert len(state["method_state"]["visits"]) == lines[-1]["known_states"]


def test_an_environment_that_lacks_what_it_needs_is_refused(plugin: Path, small: Callable[..., Any]) -> None:
    from agentgym.baselines.core.trainer import Trainer
    from tests.worlds import CountEnv

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CountEnv, "capabilities", frozenset({"expert"}))
        with pytest.raises(UsageError, match=r"novelty:Novelty.*state_key"):
            Trainer(small(method="novelty:Novelty"), Path("nowhere"))


@pytest.mark.slow
def test_the_guides_command_runs(plugin: Path) -> None:
    [command] = re.findall(r"```sh\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    path, program, *arguments = shlex.split(command)
    assert (path, program) == ("PYTHONPATH=.", "agentgym")
    small = ["--iterations", "2", "--out", "run"]
    for setting in (
        "tasks_per_iteration=2",
        "env_kwargs.max_turns=6",
        "tiny.episodes=20",
        "tiny.hidden=16",
        "method_options.group_size=2",
        "evaluation.every=0",
        "evaluation.final=4",
    ):
        small += ["--set", setting]
    done = subprocess.run(
        [sys.executable, "-m", "agentgym", *arguments, *small],
        cwd=plugin,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(plugin), str(ROOT)]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line["iteration"] for line in lines_of(plugin / "run") if line["kind"] == "train"] == [1, 2]


def test_a_module_that_is_not_found_is_explained() -> None:
    with pytest.raises(UsageError, match="no_such_module"):
        make_method("no_such_module:Method")
