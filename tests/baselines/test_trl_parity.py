"""Our GRPO loss and its gradient are those of TRL's GRPOTrainer on the same batch with the same advantages."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from tests.integrations.trl_loss import trl_grpo_loss
from tests.policies.tiny_model import make_model, make_tokenizer
from tests.shared_data import need

need("torch")
need("trl")

import torch  # noqa: E402

from agentgym.baselines.core.actor import Actor  # noqa: E402
from agentgym.baselines.core.batch import cut, make_batch, normalisers  # noqa: E402
from agentgym.baselines.core.method import make_method  # noqa: E402
from agentgym.baselines.core.sample import Sample  # noqa: E402

PROMPTS, COMPLETIONS = [5, 3, 4, 2], [9, 5, 7, 8]
CLIP = {
    "token": {"clip_low": 0.2, "clip_high": 0.28},
    "sequence": {"clip_low": 0.02, "clip_high": 0.028},  # means over a sequence lie nearer to 1
}
LIMIT = 24  # L_max of "dr_grpo"
# TRL's loss_type -> our aggregation
AGGREGATIONS = {
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "const-norm",
}


def fine_model() -> Any:
    """In double precision, so that what remains is the rounding of single-precision log-probabilities on both sides.

    With half the weights, which are large, logits and gradients are of ordinary size, and so is that rounding.
    """
    model = copy.deepcopy(make_model()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


def make_samples(model: Any, temperature: float = 1.0) -> list[Sample]:
    """Answers of unequal length with observations among them, off-policy by up to 0.4 a token, advantages a sample."""
    rng = np.random.default_rng(3)
    samples = []
    for number, (before, after) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        size = before + after
        ids = rng.integers(7, 300, size).astype(np.int32)
        action = np.arange(size) >= before
        action[before + 2 : before + 4] = False
        noise = rng.uniform(-0.4, 0.4, size)
        now = logprobs(model, ids, temperature)
        samples.append(
            Sample(
                input_ids=ids,
                action_mask=action,
                obs_mask=~action,
                turn_of=np.where(np.arange(size) < before + 4, 0, 1).astype(np.int32),
                behaviour_logp=np.where(action, now + noise, 0).astype(np.float32),
                advantage=np.where(action, rng.normal(), 0).astype(np.float32),
                pg_weight=action.astype(np.float32),
                ce_weight=np.zeros(size, np.float32),
                kl_weight=action.astype(np.float32),
                fields={"reference_logp": np.where(action, now - noise / 2, 0).astype(np.float32)},
                episode_id=f"episode {number}",
            )
        )
    return samples


def logprobs(model: Any, ids: Any, temperature: float) -> Any:
    """Log-probability of each token but the first, (T,)."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids).long()[None]).logits[0, :-1] / temperature
    chosen = torch.log_softmax(logits, -1).gather(-1, torch.from_numpy(ids[1:]).long()[:, None])
    return np.append(0.0, chosen[:, 0].numpy())


def as_trl(samples: list[Sample], *, per_token: bool = False) -> dict[str, Any]:
    """The same batch as GRPOTrainer has it: prompts padded on the left, answers on the right."""
    starts = [int(np.argmax(sample.action_mask)) for sample in samples]
    pad = {"left": max(starts), "right": max(map(len, samples)) - min(starts)}

    def rows(values: list[Any], side: str, dtype: Any) -> Any:
        matrix = np.zeros((len(values), pad[side]), dtype)
        for row, value in zip(matrix, values, strict=True):
            if side == "left":
                row[pad[side] - len(value) :] = value
            else:
                row[: len(value)] = value
        return torch.from_numpy(matrix)

    def answers(field: Any, dtype: Any = np.float64) -> Any:
        return rows([field(sample)[start:] for sample, start in zip(samples, starts, strict=True)], "right", dtype)

    prompts = [sample.input_ids[:start] for sample, start in zip(samples, starts, strict=True)]
    advantages = answers(lambda sample: sample.advantage)
    return {
        "prompt_ids": rows(prompts, "left", np.int64),
        "prompt_mask": rows([np.ones(start) for start in starts], "left", np.int64),
        "completion_ids": answers(lambda sample: sample.input_ids, np.int64),
        "completion_mask": answers(lambda sample: np.ones(len(sample)), np.int64),
        "tool_mask": answers(lambda sample: sample.action_mask, np.int64),
        "old_per_token_logps": answers(lambda sample: sample.behaviour_logp),
        "ref_per_token_logps": answers(lambda sample: sample.fields["reference_logp"]),
        "advantages": advantages if per_token else advantages[:, 0],
    }


def our_loss(
    model: Any, samples: list[Sample], method: str, *, temperature: float, budget: int, packed: bool, **options: Any
) -> tuple[float, dict[str, Any], float]:
    """Loss and gradients as one optimiser step of the trainer has them, and the share of clipped tokens."""
    terms = make_method(method, options).losses()
    weights = normalisers(samples, terms)
    actor = Actor(model, temperature=temperature)
    total, clipped, tokens = 0.0, 0.0, 0.0
    for part in cut(samples, budget):
        batch = make_batch(part, weights, packed=packed)
        outputs = actor(batch, entropy=False, keep_logits=False)
        loss = sum(term.coefficient * (batch.weights[term.name] * term.loss(batch, outputs)).sum() for term in terms)
        loss.backward()
        total += float(loss.detach())
        clipped += float(batch.reports["clip_share"].value)
        tokens += float(batch.reports["clip_share"].weight)
    return total, {name: value.grad for name, value in model.named_parameters()}, clipped / tokens


def compare(
    loss_type: Any,
    level: Any = "token",
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    budget: int = 10_000,
    packed: bool = False,
    per_token: bool = False,
) -> None:
    model = fine_model()
    samples = make_samples(model, temperature)
    if per_token:
        rng = np.random.default_rng(1)
        for sample in samples:
            sample.advantage[sample.action_mask] = rng.normal(size=sample.actions)
    wanted, gradients = trl_grpo_loss(
        model,
        make_tokenizer(),
        as_trl(samples, per_token=per_token),
        loss_type=loss_type,
        epsilon=CLIP[level]["clip_low"],
        epsilon_high=CLIP[level]["clip_high"],
        beta=beta,
        level=level,
        temperature=temperature,
        max_completion_length=LIMIT,
    )
    loss, own, clipped = our_loss(
        model,
        samples,
        "gspo" if level == "sequence" else "grpo",
        temperature=temperature,
        budget=budget,
        packed=packed,
        aggregation=AGGREGATIONS[loss_type],
        max_length=LIMIT,
        kl_coefficient=beta,
        **CLIP[level],
    )
    assert loss == pytest.approx(float(wanted), abs=1e-6)
    assert own.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, atol=1e-6, rtol=0, check_dtype=False)
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-3
    assert 0.1 < clipped < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", list(AGGREGATIONS))
def test_loss_and_gradient_are_those_of_trl(loss_type: str, level: str, beta: float) -> None:
    compare(loss_type, level, beta=beta)


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", list(AGGREGATIONS))
def test_advantages_of_each_turn_and_another_temperature(loss_type: str) -> None:
    compare(loss_type, per_token=True, temperature=0.7)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("loss_type", list(AGGREGATIONS))
def test_micro_batches_add_up_to_the_loss_of_the_whole_batch(loss_type: str, packed: bool) -> None:
    compare(loss_type, beta=0.1, budget=28, packed=packed)
