"""The worked numbers of the methods' specifications."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentgym.baselines.core.estimators import generalised_advantages, normalise, overlong_penalty
from agentgym.baselines.core.method import make_method
from agentgym.baselines.methods.opsd import peer_texts, shaped
from tests.baselines.toy import FakeServices, group_of, on_actions, run, toy_a, trajectory


def close(found: Any, wanted: Any, tolerance: float = 6e-5) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance)


def of_group(method: str, outcomes: list[float], **options: Any) -> list[float]:
    return [float(advantage[0]) for advantage in run(method, group_of(outcomes), **options)]


def test_grpo() -> None:
    close(of_group("grpo", [1, 0, 0, 0]), [1.5, -0.5, -0.5, -0.5])
    close([a[0] for a in run("grpo", toy_a())], [0.8660, -0.8660, -0.8660, 0.8660])


def test_grpo_as_verl_agent_counts_a_trajectory_once_a_turn() -> None:
    close([a[0] for a in run("grpo", toy_a(), preset="verl-agent")], [0.9487, -0.9487, -0.9487, 0.9487])


def test_verl_agent_keeps_the_raw_outcome_of_a_group_of_one() -> None:
    for method in ("grpo", "rloo"):
        assert of_group(method, [1]) == [0]
        assert of_group(method, [1], preset="verl-agent") == [1]


def test_dr_grpo() -> None:
    close(of_group("dr_grpo", [1, 0, 0, 0]), [0.75, -0.25, -0.25, -0.25])


def test_rloo() -> None:
    close(of_group("rloo", [1, 0, 0, 0]), [1, -1 / 3, -1 / 3, -1 / 3])


GIGPO_STD = [[1.7759, 1.4434], [-1.7315, -2.0207, -1.4434], [-1.7315, -1.4434], [1.6871, 2.0207, 1.4434]]
GIGPO_STEP = [[0.9098, 0.5773], [-0.8655, -1.1547, -0.5773], [-0.8655, -0.5773], [0.8211, 1.1547, 0.5773]]
GIGPO_MEAN = [[0.4869, 0.3333], [-0.4631, -0.6667, -0.3167], [-0.4631, -0.3167], [0.4394, 0.6333, 0.3333]]


def test_gigpo() -> None:
    close(run("gigpo", toy_a()), GIGPO_STD)
    episode = [0.8660, -0.8660, -0.8660, 0.8660]
    step = [advantage - whole for advantage, whole in zip(run("gigpo", toy_a()), episode, strict=True)]
    close(step, GIGPO_STEP, 2e-4)


def test_gigpo_that_only_centres_both_of_its_terms() -> None:
    episode = [0.5, -0.5, -0.5, 0.5]  # C(R) of 1, 0, 0, 1
    wanted = [np.add(step, whole) for step, whole in zip(GIGPO_MEAN, episode, strict=True)]
    close(run("gigpo", toy_a(), mode="mean_norm"), wanted)


def test_gigpo_can_centre_its_episode_term_alone() -> None:
    wanted = [np.add(step, whole) for step, whole in zip(GIGPO_STEP, [0.5, -0.5, -0.5, 0.5], strict=True)]
    close(run("gigpo", toy_a(), scale=False), wanted, 2e-4)


def test_gigpo_as_verl_agent() -> None:
    episode = [0.9487, -0.9487, -0.9487, 0.9487]
    wanted = [np.add(step, whole) for step, whole in zip(GIGPO_STEP, episode, strict=True)]
    close(run("gigpo", toy_a(), preset="verl-agent"), wanted, 2e-4)


def test_hgpo() -> None:
    wanted = [[1.0506, 0.8828], [-0.9993, -1.1657, -0.7071], [-0.9993, -0.8828], [0.9481, 1.1657, 0.7071]]
    close(run("hgpo", toy_a(), history_length=1), wanted)


@pytest.mark.parametrize(("mode", "wanted"), [("mean_norm", 0.5), ("mean_std_norm", 0.8660)])
def test_hgpo_divides_its_base_group_only_where_it_divides_its_steps(mode: str, wanted: float) -> None:
    # All states differ, so the base group is the only level.
    found = run("hgpo", group_of([1, 0, 0, 1]), mode=mode, base_group=True)
    close(found, [[wanted], [-wanted], [-wanted], [wanted]])


def test_reinforce_pp() -> None:
    def play() -> Any:
        return group_of([1, 0, 0, 0], group="one") + group_of([1, 1, 1, 0], group="two")

    plain = [a[0] for a in run("reinforce_pp", play(), kl_reward=0)]
    close(plain, np.multiply(0.9354, [1, -1, -1, -1, 1, 1, 1, -1]))
    baseline = [a[0] for a in run("reinforce_pp_baseline", play())]
    close(baseline, [1.6202, -0.5401, -0.5401, -0.5401, 0.5401, 0.5401, 0.5401, -1.6202])


def test_reinforce_pp_charges_the_divergence_from_the_reference_token_by_token() -> None:
    # Token rewards -0.5 (-1 - reference) = [.5, -.5] + [0, 1]; returns-to-go [1, .5], whitened to +-.7071.
    services = FakeServices({"reference": on_actions(0.0, -2.0)})
    found = run("reinforce_pp", [trajectory([1.0], [2])], services, kl_reward=0.5)
    close(found, [[0.7071, -0.7071]])
    assert services.asked == ["reference"]


def test_ppo() -> None:
    advantages, returns = generalised_advantages([0, 0, 1], [0.2, 0.5, 0.7], 1.0, 0.95)
    close(advantages, [0.76075, 0.4850, 0.3000])
    close(returns, [0.96075, 0.9850, 1.0])


@pytest.mark.parametrize("separate", [False, True])
def test_ppo_at_tokens_and_at_turns(separate: bool) -> None:
    values = {0: [0.2, 0.5], 1: [0.7]}

    def head(sample: Any) -> Any:
        result = np.zeros(len(sample), np.float32)
        numbers = values[0] + values[1] if not separate else values[sample.turn]
        result[sample.action_mask] = numbers
        return result

    one = trajectory([0.0, 1.0], [2, 1], separate=separate)
    close(run("ppo", [one], FakeServices(values=head), whiten=False), [[0.76075, 0.4850, 0.3000]])
    targets = np.concatenate([s.fields["value_target"][s.action_mask] for s in one.samples])
    close(targets, [0.96075, 0.9850, 1.0])
    # At turns: V = .2 and .7, so A = [.5 + .95 * .3, .3] and only the turns' first tokens train the head.
    one = trajectory([0.0, 1.0], [2, 1], separate=separate)
    close(run("ppo", [one], FakeServices(values=head), whiten=False, level="turn"), [[0.785, 0.785, 0.3]])
    assert np.concatenate([s.fields["value_weight"][s.action_mask] for s in one.samples]).tolist() == [1, 0, 1]


def test_dapo_penalises_long_answers_softly() -> None:
    assert overlong_penalty(800, 1000, 200) == 0
    assert overlong_penalty(900, 1000, 200) == -0.5
    assert overlong_penalty(1001, 1000, 200) == -1
    one = trajectory([0.0, 1.0], [400, 500])
    method = make_method("dapo", {"overlong_length": 1000, "overlong_cache": 200})
    method.rewards([one], FakeServices())
    assert one.rewards.tolist() == [0.0, 0.5]


def test_dapo_drops_groups_without_signal() -> None:
    method = make_method("dapo")
    dull, useful = group_of([0, 0, 0, 0], group="dull"), group_of([0, 1, 0, 0], group="useful")
    assert method.keep([dull, useful]) == [useful]
    assert method.refills == 9


def test_normalisation_is_over_the_sample_standard_deviation_by_default() -> None:
    close(normalise([1, 0]), [0.7071, -0.7071])
    close(normalise([1, 0], ddof=0), [1, -1])


def test_rlsd_shapes_an_advantage_and_keeps_its_sign() -> None:
    given = np.array([1, 1, -1], np.float32), np.array([0.5, -0.5, 0.5], np.float32)
    close(shaped(*given, 0.5, 0.2), [1.1, 0.9, -0.9])


def test_opsd_is_the_gap_to_the_policy_that_sees_a_successful_peer() -> None:
    made = group_of([1, 0], tokens=[2], actions=["take egg"])
    services = FakeServices({"policy": on_actions(-0.5, -1.5)})
    # The success has no successful peer but itself: its gap is 0.
    close(run("opsd", made, services), [[0, 0], [0.5, -0.5]])
    assert services.prefixes == [services.encode(peer_texts(made)[1])]
    assert "take egg" in peer_texts(made)[1]


def test_opsd_with_a_given_text_and_a_stale_teacher() -> None:
    made = group_of([0, 0])
    services = FakeServices({"stale": on_actions(-0.5)})
    method = make_method("opsd", {"source": "text", "text": "look twice", "teacher_every": 10})
    close(run(method, made, services), [[0.5], [0.5]])
    assert (services.asked, services.prefixes) == (["stale"], [[4, 5], [4, 5]])
    assert method.copies["stale"].every == 10
    assert method.after(0, made) == {"teacher_gap": pytest.approx(0.5)}


def test_rft_keeps_few_different_successes_of_each_task() -> None:
    plays = [("a b", 1, 3), ("a b", 1, 2), ("a c", 1, 2), ("d d", 0, 2), ("e e", 1, 1)]
    group = [
        trajectory([0.0, float(won)], [1, length], actions=actions.split(), number=number)
        for number, (actions, won, length) in enumerate(plays)
    ]
    dull = group_of([0, 0], group="dull")
    assert make_method("rft").keep([group, dull]) == [[group[0], group[2]]]
    assert make_method("rft", {"shortest": True}).keep([group]) == [[group[4], group[1]]]
    assert make_method("rft", {"per_task": 9, "deduplicate": False}).keep([group]) == [[*group[:3], group[4]]]
    # A task that was drawn twice still gives at most k.
    assert make_method("rft", {"per_task": 1}).keep([group[:2], group[2:]]) == [[group[0]]]


def test_dpo_leaves_out_groups_without_a_pair() -> None:
    pair = group_of([1, 0], group="pair")
    assert make_method("dpo").keep([group_of([1, 1], group="won"), pair, group_of([0, 0], group="lost")]) == [pair]
