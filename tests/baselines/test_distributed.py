"""Several processes train as one does: with copies of the weights (DDP), and with weights that are spread (FSDP2)."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.shared_data import need

need("torch")

from agentgym.baselines.core.batch import cut  # noqa: E402
from agentgym.baselines.core.config import make_train_config, write_train_config  # noqa: E402
from agentgym.baselines.core.distributed import shares, units_of  # noqa: E402
from agentgym.baselines.core.losses import LossTerm, over  # noqa: E402
from agentgym.baselines.core.method import Services  # noqa: E402
from agentgym.baselines.core.record import read_metrics, read_status  # noqa: E402
from agentgym.baselines.core.sample import Sample, Trajectory  # noqa: E402
from agentgym.baselines.methods.sft import SFT  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TINY = {"hidden": 32, "layers": 2, "feed_forward": 64, "episodes": 20}
SETTINGS: dict[str, Any] = {
    "method": "sft",
    "env_kwargs": {"tasks": "alfworld/generated:xs", "max_turns": 6},
    "iterations": 2,
    "tasks_per_iteration": 3,
    "minibatch": 2,
    "token_budget": 1024,
    "max_new_tokens": 6,
    "slots": 8,
    "tiny": TINY,
    "checkpoint_every": 0,
    "evaluation": {"every": 0, "final": 4, "greedy": False},
}
# What several processes could get wrong: a value head, a reference, an entropy bonus, several epochs, packing.
PPO: dict[str, Any] = {
    **SETTINGS,
    "method": "ppo",
    "method_options": {
        "group_size": 2,
        "step_cost": 0.1,
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.01,
        "epochs": 2,
    },
    "packing": True,
}
DDP, FSDP = "cpu2", "fsdp2"  # of baselines/configs/accelerate


class Overflow(SFT):
    """The loss of the first trajectory is infinite, wherever it is trained on."""

    first = ""

    def advantages(self, trajectories: Sequence[Trajectory], services: Services) -> None:
        super().advantages(trajectories, services)
        self.first = trajectories[0].episode.episode_id

    def losses(self) -> list[LossTerm]:
        def loss(batch: Any, outputs: Any) -> Any:
            hit = any(sample.episode_id == self.first for sample in batch.samples)
            return -outputs.logp * (math.inf if hit else 1.0)

        return [LossTerm("ce", loss, over("ce_weight", "token-mean"), 1.0)]


def run(out: Path, settings: dict[str, Any], launch: str = "", *options: str) -> subprocess.CompletedProcess[str]:
    """A training in one process, or in two with a configuration of `accelerate launch`."""
    config = out.with_suffix(".toml")
    write_train_config(config, make_train_config(settings))
    shipped = ROOT / "baselines" / "configs" / "accelerate" / f"{launch}.yaml"
    accelerate = ["accelerate.commands.launch", "--config_file", str(shipped), "--num_processes=2"]
    launcher = ["-m", *accelerate, "--main_process_port=0"] if launch else []  # a port that is free
    command = [sys.executable, *launcher, "-m", "agentgym.baselines.core.run", str(config), "--out", str(out), *options]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    return subprocess.run(
        command,
        env={**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        cwd=out.parent,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def finished(out: Path, settings: dict[str, Any], launch: str = "", *options: str) -> Path:
    done = run(out, settings, launch, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("finished: ") == (2 if launch else 1)
    return out


def weights(out: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    [file] = out.glob("checkpoints/*/model-policy/*.safetensors")
    return load_file(file)


def lines(out: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(out) if line["kind"] == kind]


def assert_same_course(one: Path, other: Path, tolerance: float = 1e-5) -> None:
    first, second = lines(one, "train"), lines(other, "train")
    assert len(first) == len(second) == 2
    for a, b in zip(first, second, strict=True):
        losses = [name for name in a if name.startswith("loss/")]
        assert losses
        for name in [*losses, "entropy", "grad_norm", "success", "turns", "outcome"]:
            assert b[name] == pytest.approx(a[name], abs=tolerance), name
        for name in ("trained_tokens", "scored_tokens", "tokens", "env_steps", "episodes_played", "groups"):
            assert b[name] == a[name], name
    [a], [b] = lines(one, "eval"), lines(other, "eval")
    assert (b["episodes"], b["successes"], b["by_kind"]) == (a["episodes"], a["successes"], a["by_kind"])
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert (value - theirs[name]).abs().max() < tolerance, name


def sample(size: int, unit: str = "", number: int = 0) -> Sample:
    zeros, no = np.zeros(size, np.float32), np.zeros(size, np.bool_)
    numbers = np.zeros(size, np.int32)
    return Sample(numbers, no, no, numbers, zeros, *(zeros + 1 for _ in range(4)), unit=unit, episode_id=str(number))


@examples(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(2, 300), st.sampled_from(["", "", "a", "b"])), min_size=1, max_size=30),
    st.integers(2, 5),
    st.sampled_from([64, 500, 4000]),
)
def test_every_sample_is_trained_on_once_and_no_process_waits(
    sizes: list[tuple[int, str]], world: int, budget: int
) -> None:
    samples = [sample(size, unit, number) for number, (size, unit) in enumerate(sizes)]
    dealt = shares(samples, budget, world)
    assert len(dealt) == world
    assert len({len(parts) for parts in dealt}) == 1
    own = set(map(id, samples))
    trained = [each for parts in dealt for part in parts for each in part if id(each) in own]
    assert sorted(map(id, trained)) == sorted(own)
    for part in (part for parts in dealt for part in parts):
        assert part
        idle = [each for each in part if id(each) not in own]
        assert idle in ([], part)
        assert all(not each.pg_weight.any() and not each.ce_weight.any() for each in idle)
        for unit in {each.unit for each in part} - {""}:
            assert sum(each.unit == unit for each in part) == sum(each.unit == unit for each in samples)


def test_one_process_keeps_the_order_of_the_batcher() -> None:
    samples = [sample(size) for size in (5, 9, 7, 30)]
    assert shares(samples, 20, 1) == [cut(samples, 20)]


def test_samples_of_a_trajectory_stay_in_one_mini_batch() -> None:
    samples = [sample(3, number=0), sample(3, number=1), sample(4, number=0)]
    assert units_of(samples, whole=True) == [[samples[0], samples[2]], [samples[1]]]
    assert units_of(samples, whole=False) == [[one] for one in samples]


@pytest.mark.slow
def test_two_processes_imitate_as_one_does(tmp_path: Path) -> None:
    settings = {**SETTINGS, "lora": {"rank": 4}}
    one = finished(tmp_path / "one", settings)
    two = finished(tmp_path / "two", settings, DDP)
    assert_same_course(one, two)
    assert lines(one, "train")[0]["loss/ce"] > 1


@pytest.mark.slow
def test_two_processes_reinforce_as_one_does_with_whole_and_with_spread_weights(tmp_path: Path) -> None:
    one = finished(tmp_path / "one", PPO)
    assert abs(lines(one, "train")[1]["loss/kl"]) > 1e-4
    assert_same_course(one, finished(tmp_path / "ddp", PPO, DDP))
    assert_same_course(one, finished(tmp_path / "fsdp", PPO, FSDP))


@pytest.mark.slow
def test_a_spread_run_continues_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole", PPO, FSDP)
    half = finished(tmp_path / "half", {**PPO, "iterations": 1}, FSDP)
    finished(half, PPO, FSDP, "--resume")
    mine, theirs = weights(whole), weights(half)
    assert all((value == theirs[name]).all() for name, value in mine.items())
    assert lines(half, "train")[1]["loss/value"] == lines(whole, "train")[1]["loss/value"]


@pytest.mark.slow
def test_trouble_in_one_process_stops_all_with_a_reason_and_a_checkpoint(tmp_path: Path) -> None:
    settings = {**SETTINGS, "method": "tests.baselines.test_distributed:Overflow"}
    done = run(tmp_path / "run", settings, DDP)
    assert done.returncode != 0
    assert done.stderr.count("stopped: ") == 2
    status = read_status(tmp_path / "run")
    assert status["state"] == "stopped"
    assert "loss" in status["reason"] or "norm" in status["reason"]
    assert weights(tmp_path / "run")
