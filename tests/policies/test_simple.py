"""Policies without a model: random, scripted, expert; and how a policy is named."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from agentgym.episode import Episode, Turn
from agentgym.errors import InfrastructureError, UsageError
from agentgym.policies.base import Policy, Reply, Request, list_policies, make_policy
from agentgym.rollout import EpisodeSpec, rollout
from agentgym.workers import make_backend
from tests.policies.fake_server import make_request


def play(policy: Policy, tasks: int = 4, slots: int = 1, **env: Any) -> list[Episode]:
    specs = [EpisodeSpec(task_id=f"count/{i:04}") for i in range(tasks)]
    backend = make_backend("threads", slots)
    try:
        episodes = rollout(specs, "test/Count-v0", policy, backend=backend, env_kwargs=env)
        return sorted(episodes, key=lambda episode: episode.task_id)
    finally:
        backend.close()


def completions(episodes: list[Episode]) -> list[list[str]]:
    return [[turn.completion for turn in episode.turns] for episode in episodes]


def answer(policy: Policy, request: Request) -> str:
    [reply] = policy.submit([request])
    assert isinstance(reply, Reply)
    return reply.text


def after(*actions: str, role: str = "agent") -> Request:
    request = make_request()
    request.history = [Turn(observation="", completion=action, role=role) for action in actions]
    return request


def test_random_is_uniform_and_the_same_for_any_number_of_slots() -> None:
    policy = make_policy("random")
    alone = play(policy, tasks=40)
    assert completions(play(make_policy("random"), tasks=40, slots=7)) == completions(alone)
    counts = Counter(text for texts in completions(alone) for text in texts)
    assert set(counts) == {"up", "down"}
    assert 0.4 < counts["up"] / counts.total() < 0.6
    assert len({tuple(texts) for texts in completions(alone)}) > 10


@pytest.mark.parametrize("action_format", ["raw", "think-action", "verl-agent"])
@pytest.mark.parametrize("name", ["random", "scripted"])
def test_answers_are_written_in_the_environments_format(name: str, action_format: str) -> None:
    for episode in play(make_policy(name), action_format=action_format):
        assert all(turn.valid for turn in episode.turns)
        assert {turn.action or turn.completion for turn in episode.turns} <= {"up", "down"}


def test_random_needs_a_list_to_choose_from() -> None:
    request = make_request()
    request.info["admissible"] = ()
    for name in ("random", "scripted"):
        policy = make_policy(name)
        assert policy.needs == {"admissible"}
        assert answer(policy, request) == ""


def test_the_explorer_takes_what_it_took_least_and_prefers_the_words_of_the_task() -> None:
    policy = make_policy("scripted")
    request = make_request()
    request.info["admissible"] = ("open the fridge", "take the apple", "look")
    request.context.instruction = "Put an APPLE on the table."
    assert answer(policy, request) == "take the apple"
    request.history = after("take the apple").history
    assert answer(policy, request) == "open the fridge"  # "the" is a shared word
    request.history = after("take the apple", "open the fridge").history
    assert answer(policy, request) == "look"
    request.history = after("take the apple", "open the fridge", "look").history
    assert answer(policy, request) == "take the apple"
    request.history = after("take the apple", role="opponent").history
    assert answer(policy, request) == "take the apple"


def test_a_script_is_followed_and_its_last_action_repeated() -> None:
    policy = make_policy("scripted", actions=["down", "up"])
    assert [answer(policy, after(*["x"] * n)) for n in range(4)] == ["down", "up", "up", "up"]
    assert answer(policy, after("x", "x", role="opponent")) == "down"
    assert policy.needs == frozenset()
    assert policy.describe() == {"name": "scripted", "actions": ["down", "up"]}
    [episode] = play(policy, tasks=1)
    assert (episode.outcome, completions([episode])) == ("success", [["down", "up", "up", "up", "up"]])


def shout(request: Request) -> str:
    """A function as a script."""
    return f"{len(request.history)} UP"


def test_a_function_may_decide() -> None:
    for policy in (
        make_policy("scripted", function="tests.policies.test_simple:shout"),
        make_policy("scripted:tests.policies.test_simple:shout"),
    ):
        assert answer(policy, after("up")) == "1 UP"


def test_the_expert_solves_and_lacking_advice_is_a_fault() -> None:
    policy = make_policy("expert")
    episodes = play(policy, slots=2)
    assert [(e.outcome, len(e.turns)) for e in episodes] == [("success", 3)] * 4
    assert all(turn.hinted for episode in episodes for turn in episode.turns)
    request = make_request()
    advised = make_request(task=1)
    advised.hint = "up"
    fault, reply = policy.submit([request, advised])
    assert isinstance(fault, InfrastructureError)
    assert isinstance(reply, Reply)
    assert reply.text == "up"


def test_policies_are_found_by_name() -> None:
    assert list_policies() == ["expert", "hf", "human", "openai_compatible", "random", "scripted", "vllm"]
    assert make_policy("tests.worlds:UpPolicy", noise=0.5).name == "up"


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("randm", {}, "Did you mean 'random'"),
        ("base", {}, "unknown policy"),
        ("_chat", {}, "unknown policy"),
        ("random", {"temperature": 1}, "temperature"),
        ("random:x", {}, "no argument"),
        ("expert:x", {}, "no argument"),
        ("human:x", {}, "no argument"),
        ("scripted", {"actions": []}, "at least one"),
        ("scripted", {"actions": ["up", 3]}, "at least one text"),
        ("scripted", {"actions": ["up"], "function": "tests.policies.test_simple:shout"}, "not both"),
        ("scripted", {"function": "tests.policies.test_simple:whisper"}, "whisper"),
        ("no.such.module:make", {}, r"no\.such"),
    ],
)
def test_bad_names_and_options_are_refused(spec: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_policy(spec, **options)
