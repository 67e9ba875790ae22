"""The loop: it goes on where it broke off, stops when something is wrong, and leaves nothing out silently."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentgym.episode import final_episodes, read_episodes
from agentgym.errors import InfrastructureError, UsageError
from tests.baselines.conftest import lines_of
from tests.shared_data import need

need("torch")

import torch  # noqa: E402

from agentgym.baselines.core import checkpoint as checkpoints  # noqa: E402
from agentgym.baselines.core.bank import Bank  # noqa: E402
from agentgym.baselines.core.learner import Diverged  # noqa: E402
from agentgym.baselines.core.method import Copy, groups_of  # noqa: E402
from agentgym.baselines.core.record import read_status  # noqa: E402
from agentgym.baselines.core.sample import make_trajectories  # noqa: E402
from agentgym.baselines.core.trainer import Trainer, train  # noqa: E402

Make = Callable[..., Any]


class Broken(RuntimeError):
    """Ends a run from outside, as a power failure does."""


def breaks_at(iteration: int) -> Callable[[dict[str, Any]], None]:
    def watch(line: dict[str, Any]) -> None:
        if line["kind"] == "progress" and line["iteration"] == iteration and line["done"] == 3:
            raise Broken

    return watch


def weights(run: Path) -> dict[str, Any]:
    """All weights and optimiser states of a run's last checkpoint."""
    from safetensors.torch import load_file

    folder = checkpoints.list_checkpoints(run)[-1]
    found = {f"{path.parent}/{path.name}": load_file(path) for path in sorted(folder.rglob("*.safetensors"))}
    values = {f"{Path(name).relative_to(folder)}/{key}": v for name, part in found.items() for key, v in part.items()}
    return {**values, **flat(checkpoints.load_state(folder)["learners"])}


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: v for k, part in value.items() for key, v in flat(part, f"{name}/{k}").items()}
    return {name: value}


def assert_same_run(one: Path, other: Path) -> None:
    assert lines_of(one) == lines_of(other)
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name], name


WAYS: dict[str, dict[str, Any]] = {
    "grpo": {"method_options": {"group_size": 4, "kl_coefficient": 0.1, "epochs": 2}, "minibatch": 5},
    "ppo": {"method": "ppo", "method_options": {"group_size": 2}},
    "dapo": {"method": "dapo", "method_options": {"group_size": 3}, "tasks_per_iteration": 2},
    "sft": {"method": "sft", "method_options": {}, "demonstrations": {"noise": 0.3}, "optimiser": {"warmup": 9}},
    "copies": {"method": "tests.baselines.odd:Copies"},
    "baseline": {"method": "tests.baselines.odd:Baseline", "optimiser": {"decay": 0.5}},
    "lora with dropout": {"lora": {"rank": 2, "dropout": 0.3}},
    "two roles": {"env": "test/Duet-v0", "policies": {"left": "a", "right": "b"}},
    "two adapters": {
        "env": "test/Duet-v0",
        "policies": {"right": "b"},
        "share_base": True,
        "lora": {"rank": 2},
        "optimiser": {"lr": 0.05},
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_was_broken_off_takes_the_course_of_an_unbroken_one(way: str, small: Make, tmp_path: Path) -> None:
    config = small(iterations=4, checkpoint_every=1, evaluation={"every": 2, "greedy": True}, **WAYS[way])
    train(config, tmp_path / "whole")
    with pytest.raises(Broken):
        train(config, tmp_path / "broken", watch=breaks_at(3))
    assert read_status(tmp_path / "broken")["state"] == "stopped"
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path / "broken")] == ["000003"]
    status = train(config, tmp_path / "broken", resume=True)
    assert status == {"state": "finished", "reason": "all iterations done", "iteration": 4}
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    lines = lines_of(tmp_path / "whole")
    assert [(line["kind"], line["iteration"]) for line in lines] == [
        ("eval", 0), ("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4), ("eval", 4), ("eval", 4),
    ]  # fmt: skip
    train(config, tmp_path / "broken", resume=True)  # finished: nothing more is done
    assert lines_of(tmp_path / "broken") == lines


def test_a_run_that_broke_off_before_its_first_checkpoint_begins_again(small: Make, tmp_path: Path) -> None:
    config = small(save_episodes=True)
    train(config, tmp_path / "whole")
    with pytest.raises(Broken):
        train(config, tmp_path / "broken", watch=breaks_at(0))
    with pytest.raises(UsageError, match="--resume"):
        train(config, tmp_path / "broken")
    train(config, tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_a_checkpoint_of_another_method_is_refused(small: Make, tmp_path: Path) -> None:
    train(small(iterations=1), tmp_path)
    with pytest.raises(UsageError, match="checkpoint of method grpo, not rloo"):
        train(small(method="rloo"), tmp_path, resume=True)


def test_a_state_that_cannot_be_saved_is_refused_by_name(small: Make, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"state\(\) cannot be saved"):
        train(small(method="tests.baselines.odd:Stateless"), tmp_path)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
import tests.worlds
from agentgym.baselines.core import checkpoint
from agentgym.baselines.core.config import read_train_config
from agentgym.baselines.core.trainer import train

out, place = Path(sys.argv[1]), sys.argv[2]
saved = 0

def dies(original, name):
    def call(*args, **kwargs):
        global saved
        saved += name == "weights"
        if saved == 3 and name == place:
            if name == "state":
                Path(args[1]).write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    return call

checkpoint.save_model = dies(checkpoint.save_model, "weights")
torch.save = dies(torch.save, "state")
checkpoint._point = dies(checkpoint._point, "pointer")
train(read_train_config(out / "config.toml"), out / "run")
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["weights", "state", "pointer"])
def test_kill_9_while_a_checkpoint_is_written_leaves_the_last_complete_one(
    place: str, small: Make, tmp_path: Path
) -> None:
    from agentgym.baselines.core.config import write_train_config

    config = small(iterations=4)
    write_train_config(tmp_path / "config.toml", config)
    command = [sys.executable, "-c", KILLED, str(tmp_path), place]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == -9, ended.stderr
    run = tmp_path / "run"
    complete = "000003" if place == "pointer" else "000002"
    assert checkpoints.list_checkpoints(run)[-1].name == complete
    assert (run / "model" / "config.json").exists()  # leads to complete weights throughout
    train(config, run, resume=True)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["000004"]  # nothing torn is left
    train(config, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", run)


@pytest.mark.parametrize("kind", ["NotANumber", "NoGradient"])
@pytest.mark.parametrize("minibatch", [0, 4])
def test_what_is_not_a_number_stops_the_run_with_a_reason_and_the_state_before(
    kind: str, minibatch: int, small: Make, tmp_path: Path
) -> None:
    config = small(method=f"tests.baselines.odd:{kind}", minibatch=minibatch, checkpoint_every=0)
    with pytest.raises(Diverged, match=r"the (loss|gradient's norm) is (nan|inf)"):
        train(config, tmp_path)
    status = read_status(tmp_path)
    assert status["state"] == "stopped"
    assert ("loss is nan" if kind == "NotANumber" else "gradient's norm is") in status["reason"]
    # The third step was bad: the third iteration's first, or the third of the first iteration's four.
    folder = tmp_path / "stopped" if minibatch else tmp_path
    [saved] = checkpoints.list_checkpoints(folder)
    assert saved.name == ("000000" if minibatch else "000002")
    assert all(torch.isfinite(v).all() for v in weights(folder).values() if isinstance(v, torch.Tensor))
    assert checkpoints.load_state(saved)["learners"]["policy"]["steps"] == 2
    if not minibatch:  # the weights before that step are those of a run that ends there
        train(small(method="tests.baselines.odd:NotANumber", iterations=2), tmp_path / "2")
        ours, theirs = weights(tmp_path), weights(tmp_path / "2")
        assert all(torch.equal(v, theirs[k]) for k, v in ours.items() if isinstance(v, torch.Tensor))


def test_an_update_that_goes_too_far_stops_the_run_and_keeps_the_checkpoint_before(small: Make, tmp_path: Path) -> None:
    options = {"minibatch": 4, "optimiser": {"lr": 0.3}, "guard": {"max_kl": 0.05}}
    with pytest.raises(Diverged, match=r"moved the policy by .* more than guard.max_kl allows"):
        train(small(**options), tmp_path / "one")
    assert checkpoints.list_checkpoints(tmp_path / "one") == []
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path / "one" / "stopped")] == ["000001"]
    roles = {"env": "test/Duet-v0", "policies": {"left": "a", "right": "b"}}
    with pytest.raises(Diverged, match=r"moved the policy of [ab] by"):
        train(small(**roles, **options), tmp_path / "two")
    with pytest.raises(Diverged, match=r"entropy .* fell below guard.min_entropy"):
        train(small(guard={"min_entropy": 1000.0}), tmp_path / "three")
    with pytest.raises(Diverged, match=r"above guard.max_grad_norm"):
        train(small(guard={"max_grad_norm": 1e-9}), tmp_path / "four")


@pytest.mark.parametrize("budget", [{"max_env_steps": 50}, {"max_tokens": 100}, {"max_seconds": 1e-6}])
def test_a_budget_ends_the_run_behind_the_iteration_that_reaches_it(
    budget: dict[str, Any], small: Make, tmp_path: Path
) -> None:
    status = train(small(iterations=9, evaluation={"every": 1}, **budget), tmp_path)
    assert status == {"state": "finished", "reason": f"{next(iter(budget))} used up", "iteration": 1}
    assert read_status(tmp_path)["reason"] == status["reason"]
    lines = lines_of(tmp_path)
    assert [(line["kind"], line["iteration"], line.get("final")) for line in lines] == [
        ("eval", 0, False), ("train", 1, None), ("eval", 1, True),
    ]  # fmt: skip
    train(small(iterations=9, evaluation={"every": 1}, **budget), tmp_path, resume=True)
    assert lines_of(tmp_path) == lines


def recount(run: Path, iterations: int) -> list[dict[str, int]]:
    """Faults and groups of each iteration, from the episodes that were written."""
    counted = []
    for iteration in range(iterations):
        episodes = [e for e in read_episodes(run, arrays=True) if e.group.startswith(f"{iteration}.")]
        groups = groups_of(make_trajectories(episodes))
        final = final_episodes(episodes)
        counted.append(
            {
                "faults": sum(not episode.finished for episode in episodes),
                "lost": sum(not episode.finished for episode in final),
                "played": sum(episode.finished for episode in final),
                "groups": len(groups),
                "silent_groups": sum(len({t.outcome for t in group}) < 2 for group in groups),
            }
        )
    return counted


def test_an_iteration_goes_on_with_the_whole_episodes_and_counts_the_faults(small: Make, tmp_path: Path) -> None:
    config = small(
        env="test/Faulty-v0",
        kinds=["ok", "raise in reset", "infrastructure", "garbage reward", "raise in step"],
        tasks_per_iteration=8,
        save_episodes=True,
        retries=1,
    )
    train(config, tmp_path)
    lines = [line for line in lines_of(tmp_path) if line["kind"] == "train"]
    expected = recount(tmp_path, 3)
    for line, numbers in zip(lines, expected, strict=True):
        assert {name: line[name] for name in numbers} == numbers
        assert line["loss/policy"] is not None
    assert all(line["faults"] > line["lost"] > 0 and line["played"] > 0 for line in lines)
    assert all(line["groups"] < 8 for line in lines)  # where all attempts faulted there is no group
    for episode in read_episodes(tmp_path):
        if not episode.finished:
            assert all(turn.reward == 0 for turn in episode.turns)
            assert episode.total_reward is None
    # What faulted was not trained on.
    trained = sum(len(s) for t in make_trajectories(read_episodes(tmp_path, arrays=True)) for s in t.samples)
    assert lines[-1]["trained_tokens"] == trained


@pytest.mark.parametrize("retries", [0, 1])
def test_a_killed_worker_costs_its_episodes_and_no_more(retries: int, small: Make, tmp_path: Path) -> None:
    import tests.baselines.odd  # noqa: F401

    marker = tmp_path / "marker"
    config = small(
        env="test/Dying-v0",
        env_kwargs={"marker": str(marker), "deaths": 2},
        iterations=1,
        tasks_per_iteration=2,
        backend="processes",
        workers=2,
        envs_per_worker=2,
        retries=retries,
        save_episodes=True,
    )
    train(config, tmp_path / "run")
    assert marker.stat().st_size == 2
    line = lines_of(tmp_path / "run")[0]
    [numbers] = recount(tmp_path / "run", 1)
    assert {name: line[name] for name in numbers} == numbers
    assert line["faults"] == 2
    assert line["lost"] == (0 if retries else 2)
    assert line["played"] == 8 - line["lost"]
    faults = [episode for episode in read_episodes(tmp_path / "run") if not episode.finished]
    assert {episode.cause for episode in faults} == {"killed"}


def test_a_flaky_episode_is_tried_again(small: Make, tmp_path: Path) -> None:
    from agentgym.policies._kept import _Page

    original, calls = _Page.complete, []

    def fails_once(self: Any, keys: Any, *args: Any) -> Any:
        calls.append(len(keys))
        if len(calls) == 4:
            raise RuntimeError("planted in the model")
        return original(self, keys, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Page, "complete", fails_once)
        train(small(iterations=1, slots=5, save_episodes=True), tmp_path)
    line = lines_of(tmp_path)[0]
    assert (line["faults"], line["lost"], line["played"]) == (calls[3], 0, 16)
    again = [episode for episode in read_episodes(tmp_path) if episode.attempt]
    assert len(again) == calls[3] < 16
    assert all(episode.finished for episode in again)


def test_no_episode_at_all_is_an_error_and_no_zero(small: Make, tmp_path: Path) -> None:
    config = small(env="test/Faulty-v0", kinds=["raise in reset"], retries=0)
    with pytest.raises(InfrastructureError, match=r"all 16 episodes faulted.*planted in reset"):
        train(config, tmp_path)
    assert read_status(tmp_path)["state"] == "stopped"
    assert lines_of(tmp_path) == []


def test_groups_without_signal_are_counted_once_whatever_a_method_keeps(small: Make, tmp_path: Path) -> None:
    for method in ("grpo", "dapo"):
        out = tmp_path / method
        train(small(method=method, tasks_per_iteration=6, save_episodes=True, iterations=2), out)
        for line, numbers in zip(lines_of(out), recount(out, 2), strict=False):
            assert {name: line[name] for name in numbers} == numbers
            assert 0 < line["silent_groups"] < line["groups"]


def test_all_episodes_of_training_can_be_kept_with_their_tokens(small: Make, tmp_path: Path) -> None:
    config = small(save_episodes=True)
    train(config, tmp_path / "whole")
    episodes = read_episodes(tmp_path / "whole", arrays=True)
    last = [line for line in lines_of(tmp_path / "whole") if line["kind"] == "train"][-1]
    assert len(episodes) == last["episodes_played"] == 48
    turns = [turn for episode in episodes for turn in episode.turns]
    assert len(turns) == last["env_steps"]
    assert sum(len(turn.arrays["completion_ids"]) for turn in turns) == last["tokens"]
    assert {turn.policy_version for turn in turns} == {0, 1, 2}
    with pytest.raises(Broken):
        train(config, tmp_path / "broken", watch=breaks_at(2))
    train(config, tmp_path / "broken", resume=True)
    told = [
        [(e.episode_id, e.attempt, [turn.completion for turn in e.turns]) for e in read_episodes(tmp_path / run)]
        for run in ("whole", "broken")
    ]
    assert told[0] == told[1]


def test_two_roles_train_their_own_parameters(small: Make, tmp_path: Path, cold_start: str) -> None:
    trainer = Trainer(
        small(env="test/Duet-v0", policies={"left": "a", "right": "b"}, minibatch=0, save_episodes=True), tmp_path
    )
    trainer.run()
    assert set(trainer.learners) == {"policy", "a", "b"}
    before = weights_of(cold_start)
    moved = {
        name: any(not torch.equal(v, before[k]) for k, v in learner.lm.state_dict().items() if k in before)
        for name, learner in trainer.learners.items()
    }
    assert moved == {"policy": False, "a": True, "b": True}
    for line in lines_of(tmp_path):
        if line["kind"] == "train":
            assert line["a/ratio"] == pytest.approx(1, abs=1e-5)
            assert line["b/ratio"] == pytest.approx(1, abs=1e-5)
            assert line["groups"] == 8  # the roles of a task are compared among their like
    trajectories = make_trajectories(read_episodes(tmp_path, arrays=True))
    assert {t.role for t in trajectories} == {"left", "right"}
    for trajectory in trajectories:
        told = [turn.reward for turn in trajectory.episode.turns if turn.role == trajectory.role]
        assert len(trajectory) == 3
        assert trajectory.outcome >= sum(told)  # and what the other's turns brought


def weights_of(folder: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(Path(folder) / "model.safetensors"))


def test_two_adapters_on_one_model_sample_and_train_apart(small: Make, tmp_path: Path) -> None:
    config = small(
        env="test/Duet-v0",
        policies={"right": "b"},
        share_base=True,
        lora={"rank": 4},
        optimiser={"lr": 0.05, "clip": 100.0},
        minibatch=0,
        method_options={"group_size": 4, "kl_coefficient": 0.01},
    )
    trainer = Trainer(config, tmp_path)
    assert trainer.learners["policy"].lm is trainer.learners["b"].lm
    base = {k: v.clone() for k, v in trainer.learners["b"].lm.state_dict().items() if "lora" not in k}
    assert not set(trainer.learners["policy"].parameters) & set(trainer.learners["b"].parameters)
    trainer.run()
    found = trainer.learners["b"].lm.state_dict()
    assert all(torch.equal(found[name], value) for name, value in base.items())
    lines = [line for line in lines_of(tmp_path) if line["kind"] == "train"]
    # Each was sampled with its own adapter: else the ratio would not be 1 before the update once they differ.
    for name in ("policy", "b"):
        assert [line[f"{name}/ratio"] for line in lines] == pytest.approx([1, 1, 1], abs=1e-5)
        assert lines[0][f"{name}/kl"] == pytest.approx(0, abs=1e-6)
        assert lines[2][f"{name}/kl"] > 1e-3
    own = [list(learner.parameters.values()) for learner in trainer.learners.values()]
    assert any(not torch.equal(a, b) for a, b in zip(*own, strict=True))


def test_copies_are_refreshed_by_their_rules_on_disk_as_in_memory(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    rules = {"first": Copy(), "stale": Copy(every=2), "average": Copy(decay=0.75)}
    rules |= {f"{name}_on_disk": Copy(every=r.every, decay=r.decay, on_disk=True) for name, r in list(rules.items())}
    bank = Bank({"p": parameter}, rules, tmp_path)
    average = 0.0
    for iteration in range(1, 5):
        for _ in range(2):
            parameter.data += 1.0
            bank.after_step()
            average = 0.75 * average + 0.25 * float(parameter[0].detach())
        bank.after_iteration(iteration)
        expected = {"first": 0.0, "stale": 4.0 * (iteration // 2), "average": average}
        for name, value in expected.items():
            for copy in (name, f"{name}_on_disk"):
                with bank.use(copy):
                    assert parameter.detach().numpy() == pytest.approx(value), (copy, iteration)
        assert parameter[0] == 2 * iteration
    again = Bank({"p": torch.nn.Parameter(torch.full((2,), 99.0))}, rules, tmp_path / "again")
    again.load_state(bank.state())
    for name in rules:
        assert torch.equal(again.state()["values"][name]["p"], bank.state()["values"][name]["p"])
    assert again.refreshed == bank.refreshed == {**dict.fromkeys(rules, 0), "stale": 4, "stale_on_disk": 4}
    with pytest.raises(UsageError, match="stale"), bank.use("stail"):
        pass


def test_a_run_scores_with_its_copies(small: Make, tmp_path: Path) -> None:
    train(small(method="tests.baselines.odd:Copies", iterations=4, optimiser={"lr": 0.01}), tmp_path)
    lines = [line for line in lines_of(tmp_path) if line["kind"] == "train"]
    far = {name: [line[f"far/{name}"] for line in lines] for name in ("first", "stale", "average")}
    for name in ("stale", "average"):
        assert [line[f"far/{name}_on_disk"] for line in lines] == far[name]
    assert far["first"][0] == 0
    assert all(value > 0 for value in far["first"][1:])
    assert [value > 0 for value in far["stale"]] == [False, True, False, True]
    assert all(0 < slow < first for slow, first in zip(far["average"][2:], far["first"][2:], strict=True))


def test_the_value_head_is_trained_and_saved(small: Make, tmp_path: Path) -> None:
    train(small(method="ppo", method_options={"group_size": 4}), tmp_path)
    lines = [line for line in lines_of(tmp_path) if line["kind"] == "train"]
    assert all(line["loss/value"] > 0 for line in lines)
    head = checkpoints.load_state(checkpoints.list_checkpoints(tmp_path)[-1])["learners"]["policy"]["value_head"]
    assert head["weight"].abs().max() > 0
    assert head["bias"].abs().max() > 0


def test_adapters_alone_are_trained_and_saved(small: Make, tmp_path: Path) -> None:
    trainer = Trainer(small(lora={"rank": 2}, optimiser={"lr": 0.05}), tmp_path)
    before = {name: value.clone() for name, value in trainer.learners["policy"].lm.state_dict().items()}
    trainer.run()
    changed = {k for k, v in trainer.learners["policy"].lm.state_dict().items() if not torch.equal(v, before[k])}
    assert changed
    assert all("lora_" in name for name in changed)
    saved = weights(tmp_path)
    assert all("lora_" in name for name in saved if name.startswith("model"))
    lines = [line for line in lines_of(tmp_path) if line["kind"] == "train"]
    assert [line["ratio"] for line in lines] == pytest.approx([1, 1, 1], abs=1e-5)


SAME_UPDATE: dict[str, dict[str, Any]] = {
    "gradient checkpointing": {"gradient_checkpointing": True},
    "small token budget": {"token_budget": 300},
    "one sample at a time": {"token_budget": 1},
    "packing": {"packing": True},
    "packing in a small budget": {"packing": True, "token_budget": 500},
    "adapters with gradient checkpointing": {"gradient_checkpointing": True, "lora": {"rank": 2}},
}


@pytest.mark.parametrize("way", SAME_UPDATE)
def test_the_update_does_not_depend_on_how_it_is_computed(way: str, small: Make, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"iterations": 1, "method_options": {"group_size": 4, "kl_coefficient": 0.1}}
    shared["lora"] = SAME_UPDATE[way].get("lora", {})
    train(small(**shared, token_budget=10**6), tmp_path / "plain")
    train(small(**{**shared, **SAME_UPDATE[way]}), tmp_path / "other")
    plain, other = (lines_of(tmp_path / run)[0] for run in ("plain", "other"))
    for line in (plain, other):
        del line["padding"], line["kind"]
    assert other == pytest.approx(plain, rel=1e-4, abs=1e-6)
    # Adam's first step hides the size of the gradient, its first moment shows it.
    ours, theirs = (
        {k: v for k, v in weights(tmp_path / run).items() if k.endswith("exp_avg")} for run in ("plain", "other")
    )
    assert ours
    for name, value in ours.items():
        assert float((value - theirs[name]).norm()) <= 1e-5 * float(value.norm()) + 1e-9, name


def test_reduced_precision_trains_in_the_same_process(small: Make, tmp_path: Path) -> None:
    train(small(iterations=1, precision="bf16"), tmp_path / "bf16")
    line = lines_of(tmp_path / "bf16")[0]
    assert line["ratio"] == pytest.approx(1, abs=0.02)
    train(small(iterations=1), tmp_path / "fp32")
    assert lines_of(tmp_path / "fp32")[0]["ratio"] == pytest.approx(1, abs=1e-5)


def test_contradictions_are_refused(small: Make, tmp_path: Path) -> None:
    for changes, message in [
        ({"share_base": True}, "set lora.rank"),
        ({"share_base": True, "lora": {"rank": 1}, "staleness": 1}, "share_base or staleness"),
        ({"policies": {"*": "a"}}, "policies names roles"),
        ({"max_context": 4}, "larger than max_new_tokens"),
        ({"kinds": ["neither"]}, "has no tasks of the kinds"),
        ({"method": "opd"}, "set teacher"),
    ]:
        with pytest.raises(UsageError, match=message):
            train(small(**changes), tmp_path / message[:5])


def test_the_numbers_of_a_line_are_those_of_the_episodes(small: Make, tmp_path: Path) -> None:
    train(small(iterations=1, save_episodes=True), tmp_path)
    line = lines_of(tmp_path)[0]
    episodes = read_episodes(tmp_path, arrays=True)
    turns = [turn for episode in episodes for turn in episode.turns]
    assert line["success"] == np.mean([episode.outcome == "success" for episode in episodes])
    assert line["outcome"] == pytest.approx(np.mean([episode.total_reward for episode in episodes]))
    assert line["invalid"] == pytest.approx(np.mean([not turn.valid for turn in turns]))
    told = np.concatenate([turn.arrays["logprobs"] for turn in turns])
    assert line["surprise"] == pytest.approx(-told.mean(), rel=1e-5)
