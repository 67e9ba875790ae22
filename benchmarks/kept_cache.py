"""New tokens a CPU second: our sampler, which keeps each conversation's cache, against `generate` on the whole history.

Run: python -m benchmarks.kept_cache. One thread; both give the same number of new tokens on the same model, in turn.
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentgym.policies._generate import Row
from agentgym.policies._kept import CachedSampler

ROWS, NEW, READ, VOCABULARY = 32, 6, 20, 512


def make_model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=4096,
        )
    ).eval()


def ours(model: Any, turns: int) -> float:
    """CPU seconds of all turns of 32 conversations."""
    rng = np.random.default_rng(0)
    sampler = CachedSampler(model, ROWS)
    seen = [list(rng.integers(5, VOCABULARY, 60)) for _ in range(ROWS)]
    began = time.process_time()
    for _ in range(turns):
        rows = [Row(ids, rng.random(NEW)) for ids in seen]
        for ids, answer in zip(seen, sampler.generate(range(ROWS), rows, temperature=1.0), strict=True):
            assert not isinstance(answer, Exception)
            ids += answer.ids
            ids += list(rng.integers(5, VOCABULARY, READ))
    return time.process_time() - began


def theirs(model: Any, turns: int) -> float:
    """The same with `generate`, which encodes everything again in each turn."""
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(5, VOCABULARY, (ROWS, 60)))
    began = time.process_time()
    for _ in range(turns):
        ids = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            min_new_tokens=NEW,
            max_new_tokens=NEW,
            pad_token_id=0,
            eos_token_id=None,
        )
        ids = torch.cat([ids, torch.from_numpy(rng.integers(5, VOCABULARY, (ROWS, READ)))], dim=1)
    return time.process_time() - began


def main() -> None:
    torch.set_num_threads(1)
    model = make_model()
    ours(model, 2)
    theirs(model, 2)
    print(f"{ROWS} conversations, {READ} tokens read and {NEW} sampled a turn, 3 x 96 Llama; new tokens a CPU second")
    print("turns      ours   generate   ratio")
    for turns in (10, 30, 50):
        pairs = [(ours(model, turns), theirs(model, turns)) for _ in range(3)]
        tokens = ROWS * NEW * turns
        best = (min(pair[0] for pair in pairs), min(pair[1] for pair in pairs))
        print(f"{turns:5d}  {tokens / best[0]:8.0f}   {tokens / best[1]:8.0f}   {best[1] / best[0]:5.2f}")


if __name__ == "__main__":
    main()
