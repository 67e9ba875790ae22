"""However a mini-batch is cut, padded or packed, its loss and its gradient are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.errors import UsageError
from tests.baselines.toy import trajectory
from tests.policies.tiny_model import make_model
from tests.shared_data import need

need("torch")

import torch  # noqa: E402

from agentgym.baselines.core import actor as actors  # noqa: E402
from agentgym.baselines.core.actor import Actor  # noqa: E402
from agentgym.baselines.core.batch import cut, make_batch, normalisers, pack  # noqa: E402
from agentgym.baselines.core.learner import minibatches  # noqa: E402
from agentgym.baselines.core.losses import (  # noqa: E402
    AGGREGATIONS,
    LossTerm,
    aggregate,
    clipped_policy_gradient,
    cross_entropy,
    entropy_bonus,
    kl_to_reference,
    value_regression,
)
from agentgym.baselines.core.sample import Sample, make_trajectories, spread  # noqa: E402

LENGTHS = (9, 3, 30, 17, 2, 30, 12, 5)


def make_sample(length: int, number: int = 0, unit: str = "") -> Sample:
    """A sample of random tokens in turns of about four, with every field filled."""
    rng = np.random.default_rng([length, number])
    action = (np.arange(length) // 2 % 2 == 1) | (np.arange(length) == max(1, length - 1))
    sample = Sample(
        input_ids=rng.integers(8, 300, length).astype(np.int32),
        action_mask=action,
        obs_mask=~action,
        turn_of=(np.arange(length) // 4).astype(np.int32),
        behaviour_logp=np.where(action, rng.normal(-5, 1, length), 0).astype(np.float32),
        advantage=np.where(action, rng.normal(0, 1, length), 0).astype(np.float32),
        pg_weight=action.astype(np.float32),
        ce_weight=(rng.random(length) * ~action).astype(np.float32),
        kl_weight=action.astype(np.float32),
        episode_id=f"episode {number}",
        unit=unit,
    )
    sample.ce_weight[0] = 0
    for name in ("reference_logp", "old_value", "value_target"):
        sample.fields[name] = np.where(action, rng.normal(-5, 1, length), 0).astype(np.float32)
    sample.fields["value_weight"] = action.astype(np.float32)
    sample.check()
    return sample


def make_samples(lengths: Sequence[int] = LENGTHS) -> list[Sample]:
    return [make_sample(length, number) for number, length in enumerate(lengths)]


def all_terms(aggregation: str = "token-mean", level: Any = "token") -> list[LossTerm]:
    return [
        clipped_policy_gradient(0.2, 0.3, aggregation=aggregation, level=level),
        kl_to_reference(0.1, aggregation=aggregation),
        entropy_bonus(0.05, aggregation=aggregation),
        cross_entropy(0.3, aggregation=aggregation),
        value_regression(0.5, 0.2, aggregation=aggregation),
    ]


def make_actor(attention: str = "sdpa", **options: Any) -> Actor:
    model = make_model().__class__(make_model().config)
    model.load_state_dict(make_model().state_dict())
    model.set_attn_implementation(attention)
    actor = Actor(model.double(), value_head=True, **options)
    torch.nn.init.normal_(actor.value_head.weight)  # type: ignore[union-attr]
    return actor


def loss_and_gradient(
    actor: Actor, samples: Sequence[Sample], terms: Sequence[LossTerm], parts: Sequence[list[Sample]], **options: Any
) -> tuple[float, dict[str, Any]]:
    """As a learner's step: the weights are those of the whole mini-batch."""
    weights = normalisers(samples, terms)
    actor.zero_grad()
    total = 0.0
    for part in parts:
        batch = make_batch(part, weights, **options)
        outputs = actor(batch, keep_logits=False)
        loss = sum(term.coefficient * (batch.weights[term.name] * term.loss(batch, outputs)).sum() for term in terms)
        loss.backward()
        total += float(loss.detach())
    return total, {name: value.grad.clone() for name, value in actor.named_parameters() if value.grad is not None}


def assert_same(one: tuple[float, dict[str, Any]], other: tuple[float, dict[str, Any]]) -> None:
    """Equal to 1e-6 of their size, which is what float32 can tell."""
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    assert one[1].keys() == other[1].keys()
    size = max(float(gradient.norm()) for gradient in other[1].values())
    for name, gradient in one[1].items():
        distance = float((gradient - other[1][name]).norm())
        assert distance < 1e-6 * max(size, 1.0), name  # a bias may be a small sum of large parts


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_and_gradient_do_not_depend_on_how_a_mini_batch_is_cut(aggregation: str, level: str) -> None:
    samples, terms, actor = make_samples(), all_terms(aggregation, level), make_actor()
    one_by_one = loss_and_gradient(actor, samples, terms, [[sample] for sample in samples])
    assert np.isfinite(one_by_one[0])
    assert_same(loss_and_gradient(actor, samples, terms, [samples]), one_by_one)
    for budget in (1, 40, 100, 10_000):
        assert_same(loss_and_gradient(actor, samples, terms, cut(samples, budget)), one_by_one)
    assert_same(loss_and_gradient(actor, samples, terms, [samples], packed=True), one_by_one)
    assert_same(loss_and_gradient(actor, samples, terms, cut(samples, 70), packed=True), one_by_one)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_samples_do_not_see_each_other(attention: str) -> None:
    samples, actor = make_samples(), make_actor(attention)
    batch = make_batch(samples, {}, packed=True, everything=True)
    assert batch.attention_mask is not None
    assert len(batch.input_ids) < len(samples)
    with torch.no_grad():
        together = actor(batch).logp.numpy()
        for index, sample in enumerate(samples):
            alone = actor(make_batch([sample], {}, everything=True)).logp.numpy()
            np.testing.assert_allclose(together[batch.sample_of.numpy() == index], alone, rtol=1e-6)


def test_logits_that_are_recomputed_in_parts_give_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, terms, actor = make_samples(), all_terms(), make_actor(temperature=0.7)
    whole = loss_and_gradient(actor, samples, terms, [samples])
    monkeypatch.setattr(actors, "CHUNK", 5 * 300)  # five tokens at once
    assert_same(loss_and_gradient(actor, samples, terms, [samples]), whole)


def test_the_temperature_of_sampling_is_that_of_the_loss() -> None:
    sample = make_sample(20)
    batch = make_batch([sample], {}, everything=True)
    actor = make_actor(temperature=0.5)
    with torch.no_grad():
        found = actor(batch)
        logits = actor.lm(input_ids=torch.from_numpy(sample.input_ids[None]).long()).logits[0, :-1] / 0.5
    expected = torch.log_softmax(logits, -1)
    tokens = torch.from_numpy(sample.input_ids[1:]).long()
    torch.testing.assert_close(
        found.logp, expected.gather(-1, tokens[:, None])[:, 0], atol=0, rtol=1e-6, check_dtype=False
    )
    entropy = -(expected.exp() * expected).sum(-1)
    torch.testing.assert_close(found.entropy, entropy, atol=0, rtol=1e-6, check_dtype=False)


lengths_strategy = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_strategy, budget=st.integers(1, 300), units=st.integers(1, 12))
def test_micro_batches_keep_the_budget_and_units_stay_together(lengths: list[int], budget: int, units: int) -> None:
    samples = [make_sample(n, i, unit=f"pair {i % units}" if i % 3 else "") for i, n in enumerate(lengths)]
    parts = cut(samples, budget)
    assert sorted(map(id, (sample for part in parts for sample in part))) == sorted(map(id, samples))
    home: dict[str, int] = {}
    for number, part in enumerate(parts):
        names = {sample.unit or str(id(sample)) for sample in part}
        assert len(part) * max(map(len, part)) <= budget or len(names) == 1
        assert make_batch(part, {}, everything=True).input_ids.numel() == len(part) * max(map(len, part))
        for sample in part:
            if sample.unit:
                assert home.setdefault(sample.unit, number) == number


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_strategy, extra=st.integers(0, 60))
def test_packing_fills_rows_without_splitting_a_sample(lengths: list[int], extra: int) -> None:
    samples, width = make_samples(lengths), max(lengths) + extra
    rows = pack(samples, width)
    assert sorted(index for row in rows for index in row) == list(range(len(samples)))
    sums = [sum(len(samples[index]) for index in row) for row in rows]
    assert max(sums) <= width
    assert sum(2 * total <= width for total in sums) <= 1  # two half-empty rows would have been one


def test_episodes_of_a_usual_spread_waste_less_than_a_twentieth_on_padding() -> None:
    lengths = np.random.default_rng(0).normal(250, 80, 128).clip(40, 500).astype(int)
    samples = make_samples([int(length) for length in lengths])
    for packed in (False, True):
        batches = [make_batch(part, {}, packed=packed, everything=True) for part in cut(samples, 8192)]
        spent = sum(batch.input_ids.numel() for batch in batches)
        padding = sum(batch.padding * batch.input_ids.numel() for batch in batches)
        assert spent - padding == pytest.approx(sum(map(len, samples)))
        assert padding / spent < 0.05


def test_cutting_many_samples_costs_little() -> None:
    samples = [make_sample(4, number) for number in range(200)] * 20
    units = [Sample(**{f: getattr(s, f) for f in Sample.__slots__}) for s in samples]
    import time

    began = time.process_time()
    parts = cut(units, 8192)
    assert time.process_time() - began < 5
    assert sum(map(len, parts)) == len(units)


def test_tokens_of_observations_have_no_gradient_and_do_not_move_the_loss() -> None:
    samples = make_samples()
    terms = [clipped_policy_gradient(0.2, 0.2), kl_to_reference(0.1)]
    weights = normalisers(samples, terms)
    batch = make_batch(samples, weights, everything=True)
    masked = ~torch.from_numpy(np.concatenate([sample.action_mask[1:] for sample in samples]))
    assert 0 < masked.sum() < len(masked)

    def loss(logp: Any) -> Any:
        outputs = actors.Outputs(logp, torch.zeros_like(logp), None, logp[:, None])
        return sum(term.coefficient * (batch.weights[term.name] * term.loss(batch, outputs)).sum() for term in terms)

    logp = torch.randn(len(masked), generator=torch.Generator().manual_seed(0)).sub(5).requires_grad_()
    value = loss(logp)
    value.backward()
    assert logp.grad is not None
    assert (logp.grad[masked] == 0).all()
    assert (logp.grad[~masked] != 0).any()
    moved = torch.where(masked, logp.detach() - 3.0, logp.detach())
    assert float(loss(moved).detach()) == float(value.detach())
    # Such tokens are not even looked at when a batch is made for an update.
    assert len(make_batch(samples, weights).tokens) == int((~masked).sum())


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_a_batch_without_any_weight_adds_nothing(level: Any) -> None:
    samples = make_samples((6, 9))
    for sample in samples:
        sample.pg_weight[:] = 0
    terms = [clipped_policy_gradient(0.2, 0.2, level=level)]
    loss, gradient = loss_and_gradient(make_actor(), samples, terms, [samples])
    assert loss == 0
    assert all(float(value.abs().max()) == 0 for value in gradient.values())


def test_worked_numbers_of_the_aggregations() -> None:
    masks = [np.array([1, 1, 1, 1], np.float32), np.array([0, 1, 0, 1], np.float32), np.zeros(3, np.float32)]
    values = [np.array([1.0, 2.0, 3.0, 4.0]), np.array([9.0, 5.0, 9.0, 7.0]), np.full(3, 100.0)]
    expected = {
        "token-mean": (10 + 12) / 6,
        "seq-mean-token-mean": (10 / 4 + 12 / 2) / 2,  # a sequence without tokens is none
        "seq-mean-token-sum": (10 + 12) / 2,
        "const-norm": (10 + 12) / 2 / 8,
    }
    assert set(expected) == set(AGGREGATIONS)
    for mode, number in expected.items():
        weights = aggregate(masks, mode, max_length=8)
        total = sum(float((weight * value).sum()) for weight, value in zip(weights, values, strict=True))
        assert total == pytest.approx(number), mode
    with pytest.raises(UsageError, match="token-mean"):
        aggregate(masks, "token-men")


def spoilt(change: Callable[[Sample], None]) -> Sample:
    each = trajectory([0.0, 1.0, 0.0], [2, 3, 1], group="room/7", number=3)
    spread(each)
    [sample] = each.samples
    change(sample)
    return sample


def _pg_on_observation(sample: Sample) -> None:
    sample.pg_weight[5] = 1.0  # the second observation


def _infinite(sample: Sample) -> None:
    sample.behaviour_logp[6] = np.inf


def _short(sample: Sample) -> None:
    sample.fields["reference_logp"] = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_pg_on_observation, r"room/7#3#0 .*token 5 \(turn 1\) was not generated"),
        (_infinite, r"room/7#3#0 .*behaviour_logp is inf at token 6 \(turn 1\)"),
        (_short, r"room/7#3#0 .*reference_logp has shape \(3,\)"),
    ],
)
def test_a_batch_that_would_train_wrong_tokens_is_refused(change: Callable[[Sample], None], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spoilt(change).check()


def test_ids_and_logprobs_that_do_not_fit_are_refused_naming_episode_and_turn() -> None:
    each = trajectory([0.0, 1.0], [2, 3], group="room/7", number=3)
    each.turns[1].arrays["logprobs"] = np.zeros(2, np.float32)
    with pytest.raises(UsageError, match=r"room/7#3#0 turn 1 \(agent\): 3 generated tokens but 2"):
        make_trajectories([each.episode])


def test_mini_batches_hold_whole_trajectories_and_pairs() -> None:
    samples = [make_sample(4, number // 2) for number in range(10)]  # two samples an episode
    found = list(minibatches(samples, 2, np.random.default_rng(0)))
    assert [len(part) for part in found] == [4, 4, 2]
    for part in found:
        names = [sample.episode_id for sample in part]
        assert all(names.count(name) == 2 for name in names)
    again = list(minibatches(samples, 2, np.random.default_rng(0)))
    assert [[id(s) for s in part] for part in again] == [[id(s) for s in part] for part in found]
    pairs = [make_sample(4, number, unit=f"pair {number % 3}") for number in range(6)]
    for part in minibatches(pairs, 1, np.random.default_rng(0)):
        assert len({sample.unit for sample in part}) == 1
