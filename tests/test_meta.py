"""The meta-environment: a paired difference, nothing from faults, and exactly nothing from an unchanged prompt."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from agentgym.checker import check_agent_env
from agentgym.env import Info
from agentgym.errors import InfrastructureError, StepOrderError, UsageError
from agentgym.meta import MetaEnv
from agentgym.policies.base import Policy, Reply, Request
from agentgym.workers import make_backend
from tests.worlds import FAULTS

OKAY = [f"faulty/{i:02}-ok" for i in range(4)]
BROKEN = f"faulty/{FAULTS.index('raise in step'):02}"


class Obedient(Policy):
    """Counts the way its prompt says, else at random: a policy that a prompt can improve."""

    name = "obedient"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def act(self, requests: Any) -> list[Reply]:
        return [Reply(text=self._choose(request), usage={"prompt_tokens": 2.0}) for request in requests]

    def _choose(self, request: Request) -> str:
        self.seen.append(request.context.system_prompt)
        for word in ("up", "down"):
            if word in request.context.system_prompt.split():
                return word
        return "up" if request.rng.random() < 0.5 else "down"


def make(env: str = "count", tasks: Any = 10, policy: Any = None, **options: Any) -> MetaEnv:
    return MetaEnv(env=env, policy=policy or Obedient(), tasks=tasks, **options)


def extra(info: Info) -> tuple[Any, ...]:
    return tuple(info["extra"][key] for key in ("before", "after", "pairs", "left_out"))


def test_a_better_prompt_is_rewarded_by_the_paired_difference() -> None:
    env = make()
    observation, info = env.reset(seed=0)
    before = info["score"]
    assert "10 of 10 episodes have a score" in observation
    assert 0.0 < before < 1.0
    observation, reward, _, _, info = env.step("always say up please")
    assert reward == pytest.approx(1.0 - before)
    assert info["score"] == 1.0
    assert extra(info) == (pytest.approx(before), 1.0, 10, 0)
    assert f"Mean score before {before:.3f}, after 1.000, over 10 tasks." in observation
    _, reward, _, _, info = env.step("always say down")
    assert reward == pytest.approx(-1.0)
    assert info["usage"]["inner_episodes"] == 30
    assert info["usage"]["prompt_tokens"] == 2 * info["usage"]["inner_turns"]


def test_the_agent_sees_the_candidate_prompt_and_first_the_inner_environments_own() -> None:
    policy = Obedient()
    env = make(policy=policy, max_turns=2)
    env.reset(seed=0)
    assert set(policy.seen) == {""}
    policy.seen.clear()
    env.step("up and up")
    assert set(policy.seen) == {"up and up"}
    env = make(policy=policy, prompt="down here")
    policy.seen.clear()
    env.reset(seed=0)
    assert set(policy.seen) == {"down here"}


def test_an_unchanged_prompt_gives_exactly_nothing_and_plays_nothing() -> None:
    policy = Obedient()
    env = make(policy=policy, prompt="play as you like")
    _, first = env.reset(seed=0)
    policy.seen.clear()
    _, reward, _, _, info = env.step("play as you like")
    assert (reward, policy.seen) == (0.0, [])
    assert info["score"] == first["score"]
    assert info["usage"]["inner_episodes"] == 10


def test_other_words_of_the_same_effect_give_exactly_nothing() -> None:
    # Before and after share seeds and the policy's draws, so an agent that reads no difference plays no difference.
    env = make(prompt="play as you like")
    env.reset(seed=0)
    _, reward, _, _, info = env.step("play just as you like")
    assert reward == 0.0
    assert info["usage"]["inner_episodes"] == 20


def test_a_prompt_tried_before_is_not_played_again() -> None:
    env = make()
    env.reset(seed=0)
    rewards = [env.step(prompt)[1] for prompt in ("up", "down", "up")]
    assert rewards[1:] == [-1.0, 1.0]
    assert env.step("down")[-1]["usage"]["inner_episodes"] == 30


def test_pairs_with_an_inner_fault_are_left_out_and_counted() -> None:
    env = make("faulty", [*OKAY, BROKEN], prompt="down", retries=0)
    _, info = env.reset(seed=0)
    assert info["score"] == 0.0  # going down never reaches the planted fault
    observation, reward, _, _, info = env.step("up")
    assert reward == 1.0
    assert extra(info) == (0.0, 1.0, 4, 1)
    assert f"{BROKEN}: 0.00 -> fault" in observation
    assert "1 tasks are left out" in observation


def test_a_step_without_any_pair_is_a_fault_and_carries_no_reward() -> None:
    env = make("faulty", [BROKEN], prompt="down")
    env.reset(seed=0)
    with pytest.raises(InfrastructureError, match="none of the 1 pairs"):
        env.step("up")
    with pytest.raises(StepOrderError):
        env.step("down")


def test_a_first_prompt_without_any_score_is_unknown_and_not_zero() -> None:
    env = make("faulty", [BROKEN], prompt="up", retries=0)
    observation, info = env.reset(seed=0)
    assert math.isnan(info["score"])
    assert "No episode has a score" in observation


def test_a_fault_that_heals_at_a_retry_costs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    env = make("flaky", 3, env_kwargs={"marker": str(marker)}, prompt="down", retries=1)
    env.reset(seed=0)
    assert not marker.exists()
    _, reward, _, _, info = env.step("up")
    assert marker.exists()
    assert (reward, info["extra"]["pairs"], info["extra"]["left_out"]) == (1.0, 3, 0)


def test_a_snapshot_carries_what_was_played() -> None:
    env, other = make(), make()
    env.reset(seed=0)
    env.step("say up")
    other.restore(env.snapshot())
    assert other.step("say down") == env.step("say down")


def test_the_contract_is_kept_with_a_deterministic_agent() -> None:
    report = check_agent_env(lambda: make(tasks=3, max_turns=3), turns=3)
    assert {"snapshot_continuation", "snapshot_damage", "bad_actions"} <= {name for name, _ in report.passed}


def test_inner_episodes_in_processes_give_the_same() -> None:
    backend = make_backend("processes", 2)
    try:
        alone, spread = make(), make(backend=backend)
        assert alone.reset(seed=0) == spread.reset(seed=0)
        assert alone.step("say up") == spread.step("say up")
    finally:
        backend.close()
        alone.close()


def test_batches_are_disjoint_and_follow_the_inner_splits() -> None:
    env = make(tasks=5)
    assert env.task_set.splits == {"test": 8}
    played: list[str] = []
    for number in range(8):
        env.reset(seed=0, options={"task": number})
        assert env.task is not None
        assert env.task_set.get(env.task.id) == env.task
        played += env.task.data["tasks"]
    assert len(set(played)) == 40
    digests = {make(tasks=tasks).task_set.digest for tasks in (5, 6, ["count/0001"], ["count/0002"])}
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 41}, "lower tasks"),
        ({"tasks": 0}, "at least 1"),
        ({"tasks": []}, "at least 1"),
        ({"tasks": "count/0001"}, "at least 1"),
        ({"tasks": ["count/0001", "count/0001"]}, "must differ"),
        ({"tasks": ["count/0001", "count/1"]}, "unknown task of count/tasks:40 'count/1'"),
        ({"split": "train"}, "unknown split"),
        ({"policy": "obedient"}, "unknown policy"),
        ({"env": "cuont"}, "Did you mean 'count'"),
        ({"env_kwargs": {"delayy": 1}}, "unknown option"),
    ],
)
def test_wrong_options_are_refused_with_what_is_possible(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(**options)


@pytest.mark.parametrize("number", ["8", "-1", "00", "\u00b2", ""])
def test_an_id_that_names_no_batch_is_refused(number: str) -> None:
    with pytest.raises(UsageError, match="unknown task of meta/count/tasks:40/5"):
        make(tasks=5).reset(seed=0, options={"task": f"meta/test/{number}"})
