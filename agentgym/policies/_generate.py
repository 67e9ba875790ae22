"""Sampling from a transformers model, a batch at a time, so that a row's draws depend on that row alone.

`generate` of transformers draws a whole batch from one generator; here every row brings its own uniform numbers, one
a token, and the token is where the number falls in the cumulative distribution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentgym.errors import require_extra


class Row(NamedTuple):
    """A prompt to be completed.

    Attributes:
        ids: the prompt.
        draws: uniform numbers in [0, 1), one for each token that may be sampled.
    """

    ids: Sequence[int]
    draws: NDArray[np.float64]


class Completion(NamedTuple):
    """What was sampled.

    Attributes:
        ids: with the token that ended it.
        logprobs: one an id, under the model at the sampling temperature (1 for greedy), before top_k and top_p.
    """

    ids: list[int]
    logprobs: list[float]


def generate(
    model: Any,
    rows: Sequence[Row],
    *,
    temperature: float,
    top_p: float | None = None,
    top_k: int | None = None,
    end_ids: Collection[int] = (),
    stopped: Callable[[Sequence[int]], bool] | None = None,
) -> list[Completion]:
    """Completes prompts together; a row that has ended leaves the batch.

    Args:
        model: a causal language model of transformers; put into evaluation mode meanwhile.
        rows: at least one; prompts of any lengths but 0.
        temperature: 0 takes the likeliest token.
        top_p: keep the likeliest tokens that together reach this probability.
        top_k: keep this many.
        end_ids: tokens that end a completion.
        stopped: called with a completion so far; True ends it.
    """
    torch = require_extra("torch", extra="hf")
    done = [Completion([], []) for _ in rows]
    running = list(range(len(rows)))
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            decoder = _Decoder(model, [row.ids for row in rows])
            for step in range(max(len(row.draws) for row in rows)):
                draws = torch.tensor([[rows[row].draws[step]] for row in running], dtype=torch.float64)
                tokens, logprobs = choose(decoder.logits, draws, temperature, top_p, top_k)
                keep = []
                for place, (row, token, logprob) in enumerate(
                    zip(running, tokens.tolist(), logprobs.tolist(), strict=True)
                ):
                    done[row].ids.append(token)
                    done[row].logprobs.append(logprob)
                    full = step + 1 == len(rows[row].draws)
                    if not (full or token in end_ids or (stopped is not None and stopped(done[row].ids))):
                        keep.append(place)
                if not keep:
                    break
                if len(keep) < len(running):
                    running = [running[place] for place in keep]
                    tokens = decoder.select(keep, tokens)
                decoder.feed(tokens)
    finally:
        model.train(training)
    return done


def choose(logits: Any, draws: Any, temperature: float, top_p: float | None, top_k: int | None) -> tuple[Any, Any]:
    """Picks one token a row.

    Args:
        logits: (rows, vocabulary).
        draws: (rows, 1) uniform numbers in [0, 1), float64.
        temperature, top_p, top_k: see `generate`.

    Returns:
        Tokens and their log-probabilities, (rows,) each.
    """
    torch = require_extra("torch", extra="hf")
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        weights = logprobs.double().exp()
        if top_k is not None and top_k < weights.shape[-1]:
            weights = weights.masked_fill(weights < weights.topk(top_k).values[:, -1:], 0.0)
        if top_p is not None and top_p < 1:
            ranked = (weights / weights.sum(-1, keepdim=True)).sort(-1, descending=True)
            needed = ranked.values.cumsum(-1) - ranked.values < top_p  # the first is always needed
            weights = weights.masked_fill(~torch.zeros_like(needed).scatter(-1, ranked.indices, needed), 0.0)
        cumulative = weights.cumsum(-1)
        # Just below 1, a draw times the total would round to the total, behind the last token with any weight.
        draws = draws.to(weights.device).clamp(max=1 - 1e-9)
        tokens = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True).squeeze(-1)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


class _Decoder:
    """A batch of growing sequences with its cache: left-padded, so that all end at the same place."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        torch = require_extra("torch", extra="hf")
        transformers = require_extra("transformers", extra="hf")
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT hides the signature
        self._accepted = set(inspect.signature(base.forward).parameters)
        self._torch = torch
        self._model = model
        self._cache = transformers.DynamicCache(config=model.config)
        width = max(len(prompt) for prompt in prompts)
        ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        real = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        self._mask = torch.tensor(real, device=model.device)
        self.logits: Any = None
        self._forward(torch.tensor(ids, device=model.device), (self._mask.cumsum(-1) - 1).clamp(min=0))

    def feed(self, tokens: Any) -> None:
        """Appends a token to each sequence."""
        self._mask = self._torch.cat([self._mask, self._torch.ones_like(self._mask[:, :1])], dim=-1)
        self._forward(tokens[:, None], self._mask.sum(-1, keepdim=True) - 1)

    def select(self, places: list[int], tokens: Any) -> Any:
        """Keeps the sequences at these places only, and returns their tokens."""
        index = self._torch.tensor(places, device=self._mask.device)
        self._cache.batch_select_indices(index)
        self._mask = self._mask[index]
        return tokens[index]

    def _forward(self, ids: Any, positions: Any) -> None:
        # The cache's argument was renamed within transformers 5.
        cache = "cache" if "cache" in self._accepted else "past_key_values"
        wanted = {"position_ids": positions, "logits_to_keep": 1}
        extra = {name: value for name, value in wanted.items() if name in self._accepted}
        output = self._model(input_ids=ids, attention_mask=self._mask, use_cache=True, **{cache: self._cache}, **extra)
        self.logits = output.logits[:, -1]
