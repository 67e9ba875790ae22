"""Prompts: full histories only ever grow, windows forget, and nothing breaks on odd text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.actions import get_format
from agentgym.errors import UsageError
from agentgym.prompts import Exchange, Message, PromptConfig, render

TEMPLATES = {"verl-agent": "agentgym.envs.alfworld.prompts:verl_agent"}


def messages(config: PromptConfig, history: list[Exchange]) -> list[Message]:
    return render(
        config,
        system_prompt="You are in a house.",
        task_instruction="find the apple",
        history=history,
        action_format=get_format("think-action"),
        templates=TEMPLATES,
    )


def history(n: int) -> list[Exchange]:
    past = [Exchange(f"obs {i}", ("help", f"go {i}"), f"<action>go {i}</action>", f"go {i}") for i in range(n)]
    return [*past, Exchange(f"obs {n}", ("help", "look", f"go {n}"))]


@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20)), max_size=6), st.booleans())
@settings(deadline=None)
def test_full_history_begins_with_the_previous_prompt(turns: list[tuple[str, str]], admissible: bool) -> None:
    config = PromptConfig(admissible=admissible)
    past: list[Exchange] = []
    before: list[Message] = []
    for observation, completion in turns:
        now = messages(config, [*past, Exchange(observation, ("a", "b"))])
        assert now[: len(before)] == before
        before = now
        past.append(Exchange(observation, ("a", "b"), completion, completion))
    assert messages(config, [*past, Exchange("end")]) == messages(config, [*past, Exchange("end")])


@pytest.mark.parametrize("template", ["chat", "single", "verl-agent"])
@pytest.mark.parametrize("window", [0, 1, 3])
def test_a_window_shows_the_last_exchanges_only(template: str, window: int) -> None:
    text = str(messages(PromptConfig(template=template, window=window, system=""), history(6)))
    for i in range(6):
        assert (f"obs {i}" in text) == (i >= 6 - window), (i, text)
    assert "obs 6" in text


def test_verl_agent_slots() -> None:
    (first,) = messages(PromptConfig(template="verl-agent"), history(0))
    assert first["role"] == "user"
    assert "obs 0" in first["content"]
    assert "'look'" in first["content"]
    assert "'help'" not in first["content"]
    assert "find the apple" not in first["content"]  # the first observation itself names the task
    (later,) = messages(PromptConfig(template="verl-agent"), history(3))
    text = later["content"]
    assert "find the apple" in text
    assert "[Observation 2: 'obs 1', Action 2: 'go 1']\n[Observation 3: 'obs 2', Action 3: 'go 2']" in text
    assert "obs 0" not in text
    assert "step 4" in text


def test_options() -> None:
    with_list = messages(PromptConfig(), history(0))
    assert [m["role"] for m in with_list] == ["system", "user"]
    assert "look" in with_list[1]["content"]
    assert "<action>" in with_list[0]["content"]
    bare = messages(PromptConfig(admissible=False, instructions=False, system=""), history(0))
    assert bare == [{"role": "user", "content": "obs 0"}]
    with pytest.raises(UsageError, match="unknown prompt template"):
        messages(PromptConfig(template="chatt"), history(0))
    with pytest.raises(UsageError, match="window must be 0 or more"):
        messages(PromptConfig(window=-1), history(0))
