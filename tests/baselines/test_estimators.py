"""What must hold of every estimator, whatever the rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.baselines.core.estimators import (
    discounted_returns,
    fuzzy_keys,
    generalised_advantages,
    history_keys,
    leave_one_out,
    normalise,
    overlong_penalty,
    whiten,
)
from agentgym.baselines.core.method import make_method
from agentgym.baselines.core.sample import Trajectory
from agentgym.baselines.methods.opsd import shaped
from agentgym.baselines.methods.ppo import rewards_at
from agentgym.errors import UsageError
from tests.baselines.toy import FakeServices, run, toy_a, trajectory

few = settings(max_examples=30, deadline=None, derandomize=True)

GROUP = ("grpo", "dr_grpo", "rloo", "dapo", "gspo")
STEP = ("gigpo", "hgpo")
numbers = st.integers(-8, 8).map(lambda eighths: eighths / 8)
outcomes = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=6)


@st.composite
def groups(draw: Any, *, group: str = "task", least: int = 2) -> list[Trajectory]:
    """Trajectories of one task over few states, with rewards at any turn."""
    made = []
    for number in range(draw(st.integers(least, 5))):
        turns = draw(st.lists(st.tuples(st.sampled_from("abc"), numbers, st.integers(1, 3)), min_size=1, max_size=4))
        states, rewards, tokens = zip(*turns, strict=True)
        made.append(
            trajectory(rewards, tokens, states=states, group=group, number=number, separate=draw(st.booleans()))
        )
    return made


def turn_advantages(method: str, trajectories: list[Trajectory], **options: Any) -> list[Any]:
    return list(make_method(method, options).turn_advantages(trajectories))


def test_a_reward_that_is_not_a_number_is_refused() -> None:
    nan = float("nan")
    with pytest.raises(UsageError, match="value 1 of the set 'b' is nan"):
        normalise([1.0, 0.0, nan], ["b", "a", "b"])
    with pytest.raises(UsageError, match="value 0 of the set 'a' is nan"):
        leave_one_out([1.0, nan], ["b", "a"])
    with pytest.raises(UsageError, match="value 2 is inf"):
        whiten([[1.0, 0.0], [float("inf")]])


@few
@given(st.lists(numbers, min_size=2, max_size=8), st.integers(0, 1))
def test_normalised_values_average_to_nothing(values: list[float], ddof: int) -> None:
    found = normalise(values, ddof=ddof)
    assert abs(found.mean()) < 1e-9
    if len(set(values)) > 1:
        assert found.std(ddof=ddof) == pytest.approx(1.0, abs=1e-4)
    else:
        assert not found.any()


@few
@given(st.lists(numbers, min_size=2, max_size=6))
def test_sample_and_population_statistics_differ_by_a_known_factor(values: list[float]) -> None:
    factor = np.sqrt((len(values) - 1) / len(values))
    np.testing.assert_allclose(normalise(values), factor * normalise(values, ddof=0), atol=1e-4)


@few
@given(st.lists(st.tuples(numbers, st.integers(1, 4)), min_size=1, max_size=5), st.integers(0, 1))
def test_counts_are_repetitions(values: list[tuple[float, int]], ddof: int) -> None:
    plain, counts = zip(*values, strict=True)
    repeated = np.repeat(plain, counts)
    last = np.cumsum(counts) - 1
    np.testing.assert_allclose(
        normalise(plain, counts=counts, ddof=ddof), normalise(repeated, ddof=ddof)[last], atol=1e-9
    )
    np.testing.assert_allclose(leave_one_out(plain, counts=counts), leave_one_out(repeated)[last], atol=1e-9)


@few
@given(st.lists(numbers, min_size=2, max_size=6))
def test_leave_one_out_compares_with_the_others(values: list[float]) -> None:
    wanted = [value - np.mean(values[:i] + values[i + 1 :]) for i, value in enumerate(values)]
    np.testing.assert_allclose(leave_one_out(values), wanted, atol=1e-9)


@few
@given(st.lists(st.lists(numbers, min_size=0, max_size=4), min_size=0, max_size=4))
def test_whitening_runs_over_all_parts_and_keeps_their_shapes(parts: list[list[float]]) -> None:
    found = whiten(parts)
    assert [len(part) for part in found] == [len(part) for part in parts]
    if parts:
        np.testing.assert_allclose(np.concatenate(found), normalise(np.concatenate(parts)), atol=1e-12)


@few
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6), numbers.map(abs))
def test_generalised_advantages_telescope(steps: list[tuple[float, float]], gamma: float) -> None:
    rewards, values = zip(*steps, strict=True)
    advantages, returns = generalised_advantages(rewards, values, gamma, 1.0)
    np.testing.assert_allclose(advantages, discounted_returns(rewards, gamma) - values, atol=1e-9)
    np.testing.assert_allclose(returns, discounted_returns(rewards, gamma), atol=1e-9)
    one_step, _ = generalised_advantages(rewards, values, gamma, 0.0)
    np.testing.assert_allclose(one_step, rewards + gamma * np.append(values[1:], 0.0) - values, atol=1e-9)


def test_histories_end_with_the_present_state() -> None:
    assert history_keys("abca", 1) == [("a",), ("b",), ("c",), ("a",)]
    assert history_keys("abca", 3) == [("a",), ("a", "b"), ("a", "b", "c"), ("b", "c", "a")]


def test_similar_texts_share_a_key() -> None:
    texts = ["you see a mug on shelf 1", "you see a mug on shelf 2", "you open the fridge", "you see a mug on shelf 1"]
    assert fuzzy_keys(texts, 0.9) == [0, 0, 1, 0]
    assert fuzzy_keys(texts, 1.0) == [0, 1, 2, 0]


@few
@given(st.integers(0, 400), st.integers(1, 200))
def test_the_overlong_penalty_only_grows_with_length(length: int, cache: int) -> None:
    here, further = (overlong_penalty(size, 200, cache) for size in (length, length + 1))
    assert -1 <= further <= here <= 0


@few
@given(st.lists(numbers, min_size=1, max_size=6), st.sets(st.integers(0, 5), min_size=1))
def test_rewards_of_turns_without_tokens_are_not_lost(rewards: list[float], turns: set[int]) -> None:
    own = np.array(sorted(turn for turn in turns if turn < len(rewards)), dtype=np.int64)
    if len(own):
        assert rewards_at(np.array(rewards), own).sum() == pytest.approx(sum(rewards))


@pytest.mark.parametrize("method", GROUP)
@few
@given(group=groups())
def test_group_advantages_average_to_nothing_over_trajectories(method: str, group: list[Trajectory]) -> None:
    assert abs(sum(advantage[0] for advantage in turn_advantages(method, group))) < 1e-9


@pytest.mark.parametrize("method", [*GROUP, *STEP])
@few
@given(data=st.data())
def test_the_order_of_trajectories_does_not_matter(method: str, data: Any) -> None:
    group = data.draw(groups())
    order = data.draw(st.permutations(range(len(group))))
    found = turn_advantages(method, group)
    permuted = turn_advantages(method, [group[place] for place in order])
    for place, advantage in zip(order, permuted, strict=True):
        np.testing.assert_allclose(advantage, found[place], atol=1e-9)


@pytest.mark.parametrize("method", [*GROUP, *STEP])
@few
@given(one=groups(group="one"), two=groups(group="two"))
def test_tasks_do_not_mix(method: str, one: list[Trajectory], two: list[Trajectory]) -> None:
    apart = turn_advantages(method, one) + turn_advantages(method, two)
    for found, wanted in zip(turn_advantages(method, one + two), apart, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize("method", [*GROUP, *STEP])
@few
@given(group=groups(), constant=st.sampled_from([0.0, 1.0, -0.5]))
def test_equal_rewards_for_all_teach_nothing(method: str, group: list[Trajectory], constant: float) -> None:
    for each in group:
        each.rewards[:] = 0.0
        each.rewards[-1] = constant
    options = {"gamma": 1.0} if method in STEP else {}
    for advantage in turn_advantages(method, group, **options):
        assert not advantage.any()


@pytest.mark.parametrize("method", [*GROUP, *STEP])
def test_a_group_of_one_teaches_nothing(method: str) -> None:
    one = trajectory([0.0, 1.0], states=["s", "t"])
    assert not turn_advantages(method, [one])[0].any()


@pytest.mark.parametrize("method", ["grpo", "dapo", "gspo", *STEP])
@few
@given(group=groups(), factor=st.sampled_from([0.5, 2.0, 10.0]))
def test_scaled_methods_do_not_see_the_unit_of_the_reward(method: str, group: list[Trajectory], factor: float) -> None:
    # Without a discount two returns are equal or an eighth apart, far more than the stabiliser.
    options = {"gamma": 1.0} if method in STEP else {}
    before = turn_advantages(method, group, **options)
    for each in group:
        each.rewards *= factor
    for found, wanted in zip(turn_advantages(method, group, **options), before, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-3)


@few
@given(group=groups())
def test_gigpo_without_common_states_is_grpo(group: list[Trajectory]) -> None:
    for number, each in enumerate(group):
        for index, turn in enumerate(each.turns):
            turn.state_key = f"{number}.{index}"
    for found, wanted in zip(turn_advantages("gigpo", group), turn_advantages("grpo", group), strict=True):
        np.testing.assert_array_equal(found, wanted)


@few
@given(group=groups())
def test_gigpo_without_its_step_weight_is_grpo(group: list[Trajectory]) -> None:
    for found, wanted in zip(
        turn_advantages("gigpo", group, step_weight=0), turn_advantages("grpo", group), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


@few
@given(group=groups())
def test_hgpo_without_history_is_the_step_term_of_gigpo(group: list[Trajectory]) -> None:
    hgpo = turn_advantages("hgpo", group, history_length=0)
    gigpo = turn_advantages("gigpo", group, ddof=0)
    grpo = turn_advantages("grpo", group, ddof=0)
    for found, both, whole in zip(hgpo, gigpo, grpo, strict=True):
        np.testing.assert_allclose(found, both - whole, atol=1e-9)


@few
@given(group=groups())
def test_hgpo_as_the_recipe_has_no_level_beyond_a_turns_history(group: list[Trajectory]) -> None:
    # The first turn has one state behind it, so that only level 1 counts; deeper ones are the same whatever K is.
    flat = turn_advantages("hgpo", group, history_length=0)
    deep = turn_advantages("hgpo", group, preset="verl-agent")
    for one, other in zip(flat, deep, strict=True):
        np.testing.assert_allclose(one[0], other[0], atol=1e-9)


def test_hgpo_can_count_the_outcome_as_a_level_of_its_own() -> None:
    step = turn_advantages("hgpo", toy_a(), history_length=0)
    outcome = turn_advantages("grpo", toy_a())
    found = turn_advantages("hgpo", toy_a(), history_length=0, base_group=True)
    for both, one, other in zip(found, step, outcome, strict=True):
        np.testing.assert_allclose(both, (2 * one + other) / 3, atol=1e-9)


@few
@given(one=groups(group="one"), two=groups(group="two"))
def test_reinforce_pp_whitens_all_tokens_of_the_batch(one: list[Trajectory], two: list[Trajectory]) -> None:
    for method in ("reinforce_pp", "reinforce_pp_baseline"):
        found = np.concatenate(run(method, one + two))
        assert abs(found.mean()) < 1e-5
        assert found.std(ddof=1) == pytest.approx(1.0, abs=1e-2) or not found.any()


@few
@given(group=groups())
def test_ppo_without_whitening_adds_up_to_the_outcome_less_the_first_value(group: list[Trajectory]) -> None:
    # With lambda = 0 the advantages are the temporal differences, which telescope.
    for level in ("token", "turn"):
        services = FakeServices(values=lambda sample: np.linspace(-1, 1, len(sample)))
        found = run("ppo", group, services, level=level, whiten=False, lam=0.0)
        for each, advantage in zip(group, found, strict=True):
            head = [sample.fields["old_value"][sample.action_mask] for sample in each.samples]
            if level == "turn":
                turns = np.concatenate([sample.turn_of[sample.action_mask] for sample in each.samples])
                advantage = advantage[np.unique(turns, return_index=True)[1]]
            assert advantage.sum() == pytest.approx(each.outcome - np.concatenate(head)[0], abs=1e-5)


def test_ppo_skips_turns_without_tokens() -> None:
    one = trajectory([0.25, 0.0, 1.0], [2, 1, 0])
    (found,) = run("ppo", [one], whiten=False, lam=1.0)
    np.testing.assert_allclose(found, [1.25, 1.25, 1.0])


@few
@given(
    st.lists(st.tuples(numbers, st.floats(-50, 50)), min_size=1, max_size=8),
    st.floats(0, 1),
    st.floats(0, 0.9),
)
def test_shaping_by_a_teacher_keeps_signs(tokens: list[tuple[float, float]], mix: float, clip: float) -> None:
    advantage, gap = (np.array(each, dtype=np.float32) for each in zip(*tokens, strict=True))
    found = shaped(advantage, gap, mix, clip)
    np.testing.assert_array_equal(np.sign(found), np.sign(advantage))
    np.testing.assert_array_equal(shaped(advantage, gap, 0.0, clip), advantage)


@few
@given(group=groups())
def test_opsd_without_a_privileged_context_is_no_signal(group: list[Trajectory]) -> None:
    for each in group:
        each.episode.outcome = "failure"
    assert not np.concatenate(run("opsd", group)).any()
    rlsd = run("opsd", group, preset="rlsd")
    for found, wanted in zip(rlsd, run("grpo", group), strict=True):
        np.testing.assert_array_equal(found, wanted)
