"""The reference loss is what TRL's documentation says it is, so that it can stand for TRL in other comparisons."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.integrations.trl_loss import trl_grpo_loss
from tests.policies.tiny_model import make_model, make_tokenizer
from tests.shared_data import need

need("torch")
need("trl")

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo"]


def fine_model() -> Any:
    """In double precision, so that what remains is the rounding of TRL's own single-precision log-probabilities."""
    return copy.deepcopy(make_model()).double()


def make_batch(*, per_token: bool = True) -> dict[str, Any]:
    """Three rows of unequal length with observations among the answers, off-policy by up to 0.4 a token."""
    import torch

    draw = torch.Generator().manual_seed(3)
    rows, prompt, width = 3, 5, 9

    def ids(columns: int) -> Any:
        return torch.randint(7, 300, (rows, columns), generator=draw)

    batch = {"prompt_ids": ids(prompt), "completion_ids": ids(width)}
    batch["prompt_mask"] = (torch.arange(prompt) >= torch.tensor([[0], [2], [1]])).long()
    batch["completion_mask"] = (torch.arange(width) < torch.tensor([[9], [5], [7]])).long()
    batch["tool_mask"] = torch.ones(rows, width, dtype=torch.long)
    batch["tool_mask"][:, 2:4] = 0
    noise = torch.rand(rows, width, generator=draw, dtype=torch.float64) * 0.8 - 0.4
    batch["old_per_token_logps"] = logprobs(fine_model(), batch).detach() + noise
    batch["ref_per_token_logps"] = logprobs(fine_model(), batch).detach() - noise / 2
    shape = (rows, width) if per_token else (rows,)
    batch["advantages"] = torch.randn(shape, generator=draw, dtype=torch.float64)
    return batch


def logprobs(model: Any, batch: dict[str, Any]) -> Any:
    """Log-probability of each completion token, (rows, tokens)."""
    import torch

    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    chosen = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return chosen[:, -batch["completion_ids"].shape[1] :]


def by_hand(model: Any, batch: dict[str, Any], loss_type: str, level: str, beta: float, corrected: bool) -> Any:
    """The clipped surrogate, summed up as each loss is described."""
    import torch

    mask = batch["completion_mask"] * batch["tool_mask"]
    now = logprobs(model, batch)
    ratio = now - batch["old_per_token_logps"]
    if level == "sequence":
        ratio = ((ratio * mask).sum(1) / mask.sum(1))[:, None]
    ratio = ratio.exp()
    advantages = batch["advantages"] if batch["advantages"].dim() == 2 else batch["advantages"][:, None]
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    difference = batch["ref_per_token_logps"] - now
    loss = loss + beta * (difference.exp() - difference - 1) * (ratio if corrected else 1)
    summed = (loss * mask).sum(1)
    if loss_type == "grpo":
        return (summed / mask.sum(1)).mean()
    return summed.sum() / (mask.numel() if loss_type == "dr_grpo" else mask.sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("per_token", "beta", "corrected"), [(True, 0.0, False), (True, 0.1, True), (False, 0.1, False)]
)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_loss_and_its_gradient(loss_type: Any, level: Any, per_token: bool, beta: float, corrected: bool) -> None:
    import torch

    batch = make_batch(per_token=per_token)
    given = fine_model()
    loss, gradients = trl_grpo_loss(
        given,
        make_tokenizer(),
        batch,
        loss_type=loss_type,
        epsilon=0.2,
        epsilon_high=0.28,
        beta=beta,
        level=level,
        use_bias_correction_kl=corrected,
    )
    model = fine_model()
    wanted = by_hand(model, batch, loss_type, level, beta, corrected)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), atol=1e-6, rtol=0, check_dtype=False)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=0, check_dtype=False)
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-3
    after = fine_model().state_dict()
    assert all(torch.equal(after[name], value) for name, value in given.state_dict().items())
    assert all(parameter.grad is None for parameter in given.parameters())
