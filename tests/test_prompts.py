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
@settings(deadline=None, derandomize=True)
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


def test_verl_agent_with_a_window_of_none_uses_the_template_without_history() -> None:
    assert "step(s)" not in messages(PromptConfig(template="verl-agent", window=0), history(3))[0]["content"]
    (bare,) = messages(PromptConfig(template="verl-agent", admissible=False), history(3))
    assert "admissible now" not in bare["content"]


@given(
    st.sampled_from(["chat", "single", "verl-agent"]),
    st.none() | st.integers(0, 9),
    st.none() | st.integers(1, 60),
    st.lists(st.tuples(st.text(), st.none() | st.lists(st.text(), max_size=3), st.text()), max_size=5),
    st.text(),
)
@settings(deadline=None, derandomize=True)
def test_any_text_is_carried_as_it_is(
    template: str,
    window: int | None,
    limit: int | None,
    turns: list[tuple[str, list[str] | None, str]],
    last: str,
) -> None:
    config = PromptConfig(template=template, window=window, max_observation=limit)
    past = [Exchange(observation, admissible, text) for observation, admissible, text in turns]
    once = messages(config, [*past, Exchange(last)])
    assert once == messages(config, [*past, Exchange(last)])
    assert once[-1]["role"] == "user"
    assert all(set(message) == {"role", "content"} for message in once)
    if limit is None or len(last) <= limit:
        assert last in once[-1]["content"]
    if template == "chat" and window is None:
        assert [m["content"] for m in once if m["role"] == "assistant"] == [text for _, _, text in turns]


def test_a_long_observation_keeps_head_and_tail() -> None:
    (message,) = messages(
        PromptConfig(max_observation=100, system="", instructions=False), [Exchange("a" * 500 + "z" * 500)]
    )
    assert len(message["content"]) == 100
    assert message["content"].startswith("aa")
    assert message["content"].endswith("zz")


def test_what_was_done_is_the_action_or_else_the_answer_itself() -> None:
    past = [Exchange("o", None, "<action>LOOK</action>", "look"), Exchange("o", None, "no tags at all")]
    for template in ("single", "verl-agent"):
        text = messages(PromptConfig(template=template), [*past, Exchange("o")])[-1]["content"]
        assert "LOOK" not in text
        assert "look" in text
        assert "no tags at all" in text


def test_a_template_may_be_named_by_its_module() -> None:
    named = PromptConfig(template="agentgym.envs.alfworld.prompts:verl_agent")
    assert messages(named, history(2)) == messages(PromptConfig(template="verl-agent"), history(2))


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
    with pytest.raises(UsageError, match="max_observation must be 1 or more"):
        messages(PromptConfig(max_observation=0), history(0))
    with pytest.raises(UsageError, match="must end with the exchange to be decided"):
        messages(PromptConfig(), [])
    with pytest.raises(UsageError, match="must end with the exchange to be decided"):
        messages(PromptConfig(), history(2)[:-1])
