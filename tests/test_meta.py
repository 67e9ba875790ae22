"""The meta-environment: a paired difference, nothing from faults, and exactly nothing from an unchanged prompt."""

from __future__ import annotations

from typing import Any

import pytest

import tests.worlds  # noqa: F401 - registers the counting and the breaking world
from agentgym.checker import check_agent_env
from agentgym.errors import InfrastructureError, StepOrderError, UsageError
from agentgym.meta import MetaEnv
from agentgym.policies.base import Policy, Reply, Request
from agentgym.workers import make_backend


class Obedient(Policy):
    """Counts the way its prompt says, else at random: a policy that a prompt can improve."""

    name = "obedient"

    def act(self, requests: Any) -> list[Reply]:
        return [Reply(text=self._choose(request)) for request in requests]

    def _choose(self, request: Request) -> str:
        for word in ("up", "down"):
            if word in request.context.system_prompt.split():
                return word
        return "up" if request.rng.random() < 0.5 else "down"


def make(env: str = "count", tasks: Any = 10, **options: Any) -> MetaEnv:
    return MetaEnv(env=env, policy=Obedient(), tasks=tasks, **options)


def test_a_better_prompt_is_rewarded_by_the_paired_difference() -> None:
    env = make(prompt="play as you like")
    env.reset(seed=0)
    _, reward, _, _, info = env.step("always say up please")
    before = info["extra"]["before"]
    assert 0.0 < before < 1.0
    assert info["score"] == info["extra"]["after"] == 1.0
    assert reward == pytest.approx(1.0 - before)
    assert (info["extra"]["pairs"], info["extra"]["left_out"]) == (10, 0)
    _, reward, _, _, info = env.step("always say down")
    assert reward == pytest.approx(-1.0)
    assert info["usage"]["episodes"] == 30


def test_an_unchanged_prompt_gives_exactly_nothing() -> None:
    env = make(prompt="play as you like")
    env.reset(seed=0)
    _, reward, _, _, info = env.step("play as you like")
    assert reward == 0.0
    _, reward, _, _, info = env.step("play just as you like")  # other words, same draws: the same episodes
    assert reward == 0.0


def test_inner_faults_carry_nothing_and_are_counted() -> None:
    env = make("faulty", ["faulty/00-ok", "faulty/00", "faulty/01-ok", "faulty/01"], prompt="down", retries=0)
    env.reset(seed=0)
    _, reward, _, _, info = env.step("up")
    assert info["extra"]["left_out"] == 2
    assert reward == pytest.approx(1.0)


def test_a_world_of_faults_is_a_fault() -> None:
    env = make("faulty", ["faulty/01"], prompt="down", retries=0)
    env.reset(seed=0)
    with pytest.raises(InfrastructureError, match="none of the 1 pairs"):
        env.step("up")
    with pytest.raises(StepOrderError):
        env.step("down")


def test_it_plays_alike_in_processes() -> None:
    backend = make_backend("processes", 2)
    try:
        alone, spread = make(), make(backend=backend)
        assert alone.reset(seed=0)[0] == spread.reset(seed=0)[0]
        assert alone.step("say up")[:2] == spread.step("say up")[:2]
    finally:
        backend.close()


def test_a_snapshot_carries_what_was_played() -> None:
    env = make(prompt="play as you like")
    env.reset(seed=0)
    env.step("say up")
    other = make(prompt="play as you like")
    other.restore(env.snapshot())
    assert other.step("say down")[:2] == env.step("say down")[:2]


@pytest.mark.slow
def test_it_keeps_the_contract() -> None:
    check_agent_env(lambda: make(tasks=3, max_turns=3), seed=0)


def test_batches_are_disjoint_and_bounded() -> None:
    env = make(tasks=5)
    played = []
    for number in range(4):
        env.reset(seed=0, options={"task": number})
        assert env.task is not None
        played += env.task.data["tasks"]
    assert len(set(played)) == 20
    with pytest.raises(UsageError, match="lower tasks"):
        make(tasks=100)
