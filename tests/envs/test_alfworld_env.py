"""The ALFWorld environment: options, capabilities and both back ends."""

from __future__ import annotations

import gymnasium as gym
import pytest

import agentgym
from agentgym.actions import canonical_call
from agentgym.envs.alfworld.env import ALFWorldEnv
from agentgym.errors import UsageError
from agentgym.prompts import PromptConfig
from tests.shared_data import need

SMALL = "alfworld/generated:s"


def make(**options: object) -> ALFWorldEnv:
    options.setdefault("tasks", SMALL)
    env = agentgym.make("alfworld", **options)
    assert isinstance(env, ALFWorldEnv)
    return env


def play_expert(env: ALFWorldEnv) -> tuple[int, float, list[str]]:
    turns, total, phases = 0, 0.0, []
    ended = False
    while not ended:
        action = env.expert()
        assert action is not None
        _, reward, terminated, truncated, info = env.step(action)
        turns, total = turns + 1, total + reward
        phases.append(info["extra"].get("phase", ""))
        assert info["valid"]
        ended = terminated or truncated
    return turns, total, phases


@pytest.mark.parametrize("action_format", ["raw", "think-action", "tool-call-json", "tool-call-hermes", "verl-agent"])
def test_the_expert_wins_in_every_action_format(action_format: str) -> None:
    env = make(action_format=action_format)
    env.reset(seed=1)
    _, total, _ = play_expert(env)
    assert total == 1.0


def test_tool_calls_reach_the_game() -> None:
    env = make(action_format="tool-call-hermes")
    env.reset(seed=1)
    call = canonical_call("act", {"command": "inventory"})
    observation, _, _, _, info = env.step(f"<tool_call>{call}</tool_call>")
    assert observation == "You are not carrying anything."
    assert info["valid"]
    observation, _, _, _, info = env.step('<tool_call>{"name": "walk", "arguments": {}}</tool_call>')
    assert "there is no tool 'walk'" in observation
    assert not info["valid"]
    assert info["turn"] == 2


def test_verl_agent_compatibility() -> None:
    env = make(compat="verl-agent")
    env.reset(seed=1)
    observation, _, _, _, info = env.step("I would rather do nothing at all here, INVENTORY")
    assert not info["valid"]
    assert info["extra"]["valid_format"] is False
    assert observation == "Nothing happens."
    observation, _, _, _, info = env.step("<action>Inventory</action>")
    assert observation == "You are not carrying anything."  # no thought: invalid, and carried out all the same
    assert not info["valid"]
    assert info["extra"]["action"] == "inventory"
    _, total, _ = play_expert(env)
    assert total == 10.0
    assert env.max_turns == 50
    assert make(compat="verl-agent", success_reward=2.0, action_format="raw").success_reward == 2.0
    assert PromptConfig(template="verl-agent").template in env.prompt_templates


def test_invalid_commands_are_told_apart() -> None:
    env = make(action_format="think-action")
    env.reset(seed=1)
    observation, _, _, _, info = env.step("<think>x</think><action>fly</action>")
    assert observation == "Nothing happens."
    assert (info["valid"], info["extra"]["valid_format"], info["extra"]["in_admissible"]) == (False, True, False)
    observation, _, _, _, info = env.step("fly")
    assert observation.startswith("Invalid action:")
    assert info["valid"] is False


@pytest.mark.parametrize("expert", ["scripted", "explorer", "planner"])
def test_experts_phases_and_checkpoints(expert: str) -> None:
    env = make(expert=expert)
    _, info = env.reset(seed=3)
    assert info["checkpoints"] == ()
    turns, total, phases = play_expert(env)
    assert total == 1.0
    assert phases[0] == "find"
    assert {"find", "place"} <= set(phases) | {"place"}
    _, _, _, _, info = make_and_step(env, "look")
    planned = make(expert="planner")
    planned.reset(seed=3)
    assert play_expert(planned)[0] <= turns


def make_and_step(env: ALFWorldEnv, action: str) -> tuple[str, float, bool, bool, agentgym.Info]:
    env.reset(seed=3)
    target = next(command for command in env.reset(seed=3)[1]["admissible"] or () if command.startswith("go to"))
    env.step(target)
    result = env.step(action)
    assert f"seen {target.removeprefix('go to ')}" in result[4]["checkpoints"]
    return result


@pytest.mark.parametrize(
    "options", [{}, {"domain_randomization": True}, {"grammar": "put"}, {"strict_appliances": True}]
)
def test_snapshots_carry_everything(options: dict[str, object]) -> None:
    env = make(**options)
    env.reset(seed=5)
    for _ in range(3):
        action = env.expert()
        assert action is not None
        env.step(action)
    saved = env.snapshot()
    rest = play_expert(env)
    other = make(**options)
    observation, info = other.restore(saved)
    assert info["turn"] == 3
    assert play_expert(other) == rest
    assert observation


def test_domain_randomization_shuffles_numbers_by_the_seed() -> None:
    env = make(domain_randomization=True, tasks="alfworld/generated:real")
    texts = set()
    for seed in range(4):
        env.reset(seed=seed, options={"task": 0})
        for command in ("go to drawer 1", "go to cabinet 1", "go to shelf 1", "go to countertop 1"):
            texts.add((command, env.step(command)[0]))
    plain = make(tasks="alfworld/generated:real")
    plain.reset(seed=0, options={"task": 0})
    assert len(texts) > 4
    first = env.reset(seed=7, options={"task": 0})
    assert env.reset(seed=7, options={"task": 0}) == first


def test_the_old_wording_can_be_played() -> None:
    env = make(grammar="put")
    _, info = env.reset(seed=2)
    assert "help" not in (info["admissible"] or ())
    assert "put {object} in/on" in env.system_prompt
    assert play_expert(env)[1] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "text"}, "Did you mean 'textworld'"),
        ({"grammar": "old"}, "unknown grammar"),
        ({"expert": "handcoded"}, "unknown expert of backend 'native'"),
        ({"compat": "verl"}, "Did you mean 'verl-agent'"),
        ({"backend": "textworld", "grammar": "put"}, "leave grammar"),
        ({"action_format": "search-answer"}, "cannot carry household commands"),
    ],
)
def test_bad_options_say_what_is_possible(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(**options)


@pytest.mark.slow
@pytest.mark.parametrize("expert", ["scripted", "handcoded"])
def test_the_package_itself_as_back_end(expert: str) -> None:
    need("textworld")
    native = make(split="valid_seen")
    package = make(split="valid_seen", backend="textworld", expert=expert)
    try:
        for task in range(2):
            assert native.reset(seed=0, options={"task": task})[0] == package.reset(seed=0, options={"task": task})[0]
            ended = False
            while not ended:
                action = package.expert() or "look"
                ours, theirs = native.step(action), package.step(action)
                assert ours[:4] == theirs[:4]
                assert ours[4]["admissible"] == theirs[4]["admissible"]
                ended = ours[2] or ours[3]
        with pytest.raises(UsageError, match="no snapshots"):
            package.snapshot()
    finally:
        package.close()


def test_gymnasium_makes_it_with_and_without_the_import() -> None:
    env = gym.make("agentgym:agentgym/ALFWorld-v0", tasks=SMALL, split="test", max_turns=3)
    env.reset(seed=0)
    assert [env.step("look")[3] for _ in range(3)] == [False, False, True]
    with pytest.raises(UsageError, match="the episode has ended"):
        env.step("look")
