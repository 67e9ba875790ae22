"""The worked numbers of the methods' losses, with torch, on hand-made mini-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentgym.baselines.core.method import make_method
from agentgym.errors import UsageError
from tests.baselines.toy import FakeServices, group_of, on_actions, run, total_loss, trajectory
from tests.shared_data import need

need("torch")


def sample(advantages: list[float], *, old: float | list[float] = 0.0, turns: list[int] | None = None) -> Any:
    """A sample whose generated tokens have these advantages and old log-probabilities."""
    (made,) = trajectory([0.0] * len(turns or [0]), turns or [len(advantages)]).samples
    made.advantage[made.action_mask] = advantages
    made.behaviour_logp[made.action_mask] = old
    return made


def loss_of(method: str, samples: list[Any], logp: list[list[float]], **options: Any) -> float:
    return total_loss(make_method(method, options).losses(), samples, logp)[0]


def test_dapo_clips_further_up_than_down() -> None:
    assert loss_of("dapo", [sample([1.0])], [[np.log(1.35)]]) == pytest.approx(-1.28, abs=1e-6)
    assert loss_of("dapo", [sample([-1.0])], [[np.log(0.7)]]) == pytest.approx(0.8, abs=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "wanted"), [("token-mean", 0.5), ("seq-mean-token-mean", 0.0), ("const-norm", 0.2)]
)
def test_how_tokens_are_averaged(aggregation: str, wanted: float) -> None:
    samples = [sample([1.0] * 2), sample([-1.0] * 6)]
    found = loss_of("dr_grpo", samples, [[0.0] * 2, [0.0] * 6], aggregation=aggregation, max_length=10)
    assert found == pytest.approx(wanted, abs=1e-6)


def test_dr_grpo_divides_by_the_greatest_length() -> None:
    samples = [sample([1.0] * 2), sample([-1.0] * 6)]
    assert loss_of("dr_grpo", samples, [[0.0] * 2, [0.0] * 6], max_length=10) == pytest.approx(0.2)


def test_gspo_shares_one_ratio_a_sequence() -> None:
    loss, (derivative,) = total_loss(make_method("gspo").losses(), [sample([-1.0] * 4)], [[0.1, -0.2, 0.3, 0.2]])
    assert loss == pytest.approx(np.exp(0.1), abs=1e-6)  # s = 1.1052
    np.testing.assert_allclose(derivative[-4:], np.exp(0.1) / 4, atol=1e-6)
    # With a positive advantage it is clipped, and nothing is learnt.
    loss, (derivative,) = total_loss(make_method("gspo").losses(), [sample([1.0] * 4)], [[0.1, -0.2, 0.3, 0.2]])
    assert loss == pytest.approx(-1.0004, abs=1e-6)
    assert not derivative.any()


def test_gspo_can_share_a_ratio_a_turn() -> None:
    one = sample([-1.0] * 4, turns=[2, 2])
    found = loss_of("gspo", [one], [[0.1, 0.3, 0.2, 0.2]], level="turn")
    assert found == pytest.approx(np.exp(0.2), abs=1e-6)


def test_the_divergence_from_the_reference() -> None:
    for gap, wanted in ((0.2, 0.0214), (-0.3, 0.040818)):
        one = sample([0.0])
        one.fields["reference_logp"] = np.full(len(one), gap, np.float32)
        assert loss_of("grpo", [one], [[0.0]], kl_coefficient=1.0) == pytest.approx(wanted, abs=5e-6)


def test_ppo_clips_the_value() -> None:
    one = sample([0.0, 0.0])
    # Old 0, target 1: 2 is worse than its clipped .5 and counts whole; .9 counts as the clipped .5.
    for name, number in (("old_value", 0.0), ("value_target", 1.0), ("value_weight", 1.0)):
        one.fields[name] = on_actions(number, number)(one)
    terms = make_method("ppo").losses()
    loss, _ = total_loss(terms, [one], [[0.0, 0.0]], values=[[2.0, 0.9]])
    assert loss == pytest.approx(0.5 * 0.5 * (1.0 + 0.25) / 2, abs=1e-6)


def test_rft() -> None:
    (one,) = group_of([1.0], tokens=[3])
    make_method("rft").advantages([one], FakeServices())
    assert loss_of("rft", one.samples, [np.log([0.5, 0.25, 0.8]).tolist()]) == pytest.approx(0.7675, abs=5e-5)


@pytest.mark.parametrize("separate", [False, True])
def test_dpo(separate: bool) -> None:
    # The better trajectory's log-probabilities sum to -10 (reference -12), the worse one's to -9 (-8).
    made = [
        trajectory([0.0, outcome], [1, 1], number=number, separate=separate)
        for number, outcome in enumerate((1.0, 0.0))
    ]

    def reference(given: Any) -> Any:
        won = given.episode_id.endswith("#0#0")
        return on_actions(*[(-6.0 if won else -4.0)] * given.actions)(given)

    method = make_method("dpo")
    assert method.keep([made]) == [made]
    method.advantages(made, FakeServices({"reference": reference}))
    samples = method.samples(made)
    assert len(samples) == (4 if separate else 2)
    assert {one.unit for one in samples} == {"task"}
    logp = [[-5.0 if one.episode_id.endswith("#0#0") else -4.5] * one.actions for one in samples]
    loss, derivatives = total_loss(method.losses(), samples, logp)
    assert loss == pytest.approx(0.5544, abs=5e-5)
    for one, derivative in zip(samples, derivatives, strict=True):
        side = 1 if one.episode_id.endswith("#0#0") else -1
        np.testing.assert_allclose(derivative[one.action_mask], -side * 0.1 * 0.4256, atol=5e-6)
        assert not derivative[~one.action_mask].any()


def test_dpo_is_a_mean_over_pairs() -> None:
    method = make_method("dpo")
    made = [one for name in ("a", "b") for one in group_of([1.0, 0.0, 0.0], group=name, tokens=[2])]
    method.advantages(made, FakeServices())
    samples = method.samples(made)
    assert len(samples) == 4
    assert total_loss(method.losses(), samples, [[-1.0] * 2] * 4)[0] == pytest.approx(np.log(2))


def test_dpo_refuses_half_a_pair() -> None:
    method = make_method("dpo")
    made = group_of([1.0, 0.0])
    method.advantages(made, FakeServices())
    with pytest.raises(UsageError, match="lost one of its sides"):
        total_loss(method.losses(), made[0].samples, [[-1.0]])


def test_opd_as_a_reward_and_as_a_loss() -> None:
    one = trajectory([0.0], [2])
    one.samples[0].behaviour_logp[one.samples[0].action_mask] = [-0.5, -2.0]
    services = FakeServices({"teacher": on_actions(-0.2, -3.0)})
    method = make_method("opd")
    np.testing.assert_allclose(run(method, [one], services)[0], [0.3, -1.0], atol=1e-6)
    assert method.after(0, [one])["reverse_kl"] == pytest.approx(0.35)
    wanted = np.mean([np.exp(gap) - gap - 1 for gap in (0.3, -1.0)])
    assert loss_of("opd", one.samples, [[-0.5, -2.0]], mode="loss") == pytest.approx(wanted, abs=1e-6)


def test_skill_sd_draws_the_policy_to_the_teacher_where_there_is_one() -> None:
    made = group_of([1.0, 0.0], tokens=[2])
    services = FakeServices({"policy": on_actions(-0.5, -1.5)})
    method = make_method("opsd", {"preset": "skill-sd", "coefficient": 1.0})
    run(method, made, services)
    samples = method.samples(made)
    loss, _ = total_loss([method.losses()[-1]], samples, [[-0.9, -1.0], [-0.9, -1.0]])
    # Only the failed one has a successful peer; lp - lp_T is -.4 and .5, the ratios are exp(.1) and 1.
    wanted = np.mean([np.exp(0.1) * (np.exp(-0.4) - 0.6), np.exp(0.5) - 1.5])
    assert loss == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("grpo", {"kl_coefficient": 0.1, "entropy_coefficient": 0.1}),
        ("sft", {}),
        ("rft", {}),
        ("ppo", {}),
        ("gspo", {}),
        ("opd", {"mode": "loss"}),
        ("opsd", {"preset": "skill-sd"}),
    ],
)
def test_every_term_is_divided_by_the_greatest_length(method: str, options: dict[str, Any]) -> None:
    (one,) = group_of([1.0], tokens=[3])
    chosen = make_method(method, {**options, "aggregation": "const-norm", "max_length": 10})
    for sample in one.samples:
        sample.ce_weight[sample.action_mask] = 1.0
        for name in ("value_weight", "teacher_weight"):
            sample.fields[name] = sample.action_mask.astype(np.float32)
    for term in chosen.losses():
        (weights,) = term.weights(one.samples)
        np.testing.assert_allclose(weights[one.samples[0].action_mask], 0.1, err_msg=term.name)


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_ratio_beyond_all_bounds_still_gives_a_number(advantage: float) -> None:
    for method in ("grpo", "gspo"):
        for logp in (200.0, -200.0):
            loss, (derivative,) = total_loss(make_method(method).losses(), [sample([advantage])], [[logp]])
            assert np.isfinite(loss)
            assert np.isfinite(derivative).all()


POLICY_GRADIENTS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dapo", "gspo", "gigpo", "hgpo")


@pytest.mark.parametrize("method", [*POLICY_GRADIENTS, "opd", "opsd", "ppo"])
def test_tokens_that_the_policy_did_not_generate_have_no_gradient(method: str) -> None:
    made = group_of([1.0, 0.0], turns=2, tokens=[2, 1], states=["s", "t"])
    chosen = make_method(method, {"kl_reward": 0} if method == "reinforce_pp" else {})
    run(chosen, made, FakeServices({"teacher": on_actions(-0.1, -0.2, -0.3), "policy": on_actions(-0.1, -2.0, -0.3)}))
    samples = chosen.samples(made)
    rng = np.random.default_rng(0)
    logp = [rng.normal(-1.0, 1e-5, len(one) - 1) for one in samples]
    values = [np.zeros(len(each)) for each in logp] if method == "ppo" else None
    terms = chosen.losses()
    loss, derivatives = total_loss(terms, samples, logp, values)
    assert any(derivative.any() for derivative in derivatives)
    for one, derivative in zip(samples, derivatives, strict=True):
        assert not derivative[~one.action_mask].any()
    moved = [np.where(one.action_mask[1:], each, each - 5) for one, each in zip(samples, logp, strict=True)]
    assert total_loss(terms, samples, moved, values)[0] == pytest.approx(loss, abs=1e-7)
