"""The model that is trained: a causal language model, with a value head where a method needs one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from agentgym.baselines.core.batch import Batch, Outputs
from agentgym.policies._kept import split_head

CHUNK = 1 << 25  # logits computed at once when more would have to be kept for the gradient


class Actor(nn.Module):
    """Log-probabilities, entropies and values of selected tokens.

    Args:
        lm: a causal language model of transformers, or a peft model around one.
        value_head: add a linear value head on the last hidden states, at 0 to begin with.
        temperature: of sampling; the logits are divided by it.
    """

    def __init__(self, lm: Any, *, value_head: bool = False, temperature: float = 1.0) -> None:
        super().__init__()
        self.lm = lm
        base = lm.get_base_model() if hasattr(lm, "get_base_model") else lm
        size = base.config.get_text_config().hidden_size
        self.value_head = nn.Linear(size, 1) if value_head else None
        if self.value_head is not None:
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
            self.value_head.to(base.device)
        self.temperature = temperature
        self._no_split_modules = getattr(base, "_no_split_modules", None)  # where FSDP may wrap

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return next(self.lm.parameters()).device

    def forward(self, batch: Batch, *, entropy: bool = True, keep_logits: bool = True) -> Outputs:
        """What the model says about the batch's selected tokens.

        Args:
            batch: a micro-batch.
            entropy: let gradient flow through the entropies.
            keep_logits: return the logits; without, large ones are recomputed in parts when the gradient needs them.
        """
        base = self.lm.get_base_model() if hasattr(self.lm, "get_base_model") else self.lm
        hidden_states, head = split_head(base)
        mask = batch.attention_mask
        if mask is not None and base.config._attn_implementation != "sdpa":
            mask = torch.zeros_like(mask, dtype=base.dtype).masked_fill(~mask, torch.finfo(base.dtype).min)
        hidden = hidden_states(batch.input_ids, position_ids=batch.position_ids, attention_mask=mask)
        chosen = hidden.flatten(0, 1)[batch.places]
        value = None if self.value_head is None else self.value_head(chosen.float()).squeeze(-1)
        vocabulary = base.config.get_text_config().vocab_size
        if keep_logits or len(chosen) * vocabulary <= CHUNK:
            logits = head(chosen).float() / self.temperature
            logp, spread = _read(logits, batch.tokens, entropy)
            return Outputs(logp, spread, value, logits)
        parts = max(1, CHUNK // vocabulary)
        logps, spreads = [], []

        def part(piece: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
            return _read(head(piece).float() / self.temperature, tokens, entropy)

        for start in range(0, len(chosen), parts):
            piece, tokens = chosen[start : start + parts], batch.tokens[start : start + parts]
            logp, spread = (
                checkpoint(part, piece, tokens, use_reentrant=False) if piece.requires_grad else part(piece, tokens)
            )
            logps.append(logp)
            spreads.append(spread)
        return Outputs(torch.cat(logps), torch.cat(spreads), value, chosen.new_zeros(0))


def _read(logits: Tensor, tokens: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    everything = functional.log_softmax(logits, dim=-1)
    logp = everything.gather(-1, tokens[:, None]).squeeze(-1)
    used = everything if gradient else everything.detach()
    return logp, -(used.exp() * used).sum(-1)
