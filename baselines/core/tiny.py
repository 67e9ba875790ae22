"""The model "tiny": a small Llama with a word tokenizer built from the environment's own text.

It is there to learn on a laptop through exactly the code path of a large model: a folder that AutoModelForCausalLM and
AutoTokenizer load, with a chat template.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentgym.baselines.core.config import Tiny
from agentgym.env import require_capabilities
from agentgym.errors import UsageError
from agentgym.policies.expert import ExpertPolicy
from agentgym.registry import env_class, make_env
from agentgym.rollout import EpisodeSpec, rollout
from agentgym.task import resolve_split

WORDS = r"[^\W\d_]+|\d+|[^\w\s]|_"
SPECIAL = ("<pad>", "<unk>", "<obs>", "<act>", "<eos>")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<act>{{ message['content'] }}<eos>"
    "{% else %}<obs>{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<act>{% endif %}"
)


def make_tokenizer(texts: Counter[str], size: int, max_positions: int) -> PreTrainedTokenizerFast:
    """A lower-case word tokenizer; numbers and punctuation are tokens of their own.

    Args:
        texts: texts and how often each occurs.
        size: most words, special tokens and the numbers below 100 included.
        max_positions: longest sequence of the model.
    """
    words: Counter[str] = Counter()
    for text, count in texts.items():
        for word in re.findall(WORDS, text.lower()):
            words[word] += count
    ranked = sorted(words, key=lambda word: (-words[word], word))
    known = [*SPECIAL, *map(str, range(100))]
    known += [word for word in ranked if word not in set(known)]
    vocabulary = {word: number for number, word in enumerate(known[:size])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        additional_special_tokens=["<obs>", "<act>"],
        model_max_length=max_positions,
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def collect_texts(env: str, env_kwargs: Mapping[str, Any], split: str, episodes: int) -> Counter[str]:
    """What an expert sees, does and could do: the text that a tokenizer for this environment needs."""
    require_capabilities(env_class(env), {"expert"}, who='model "tiny"')
    made = make_env(env, **env_kwargs)
    try:
        tasks = made.task_set
        name = resolve_split(tasks, split)
        ids = [tasks.at(name, index).id for index in range(min(episodes, tasks.splits[name]))]
    finally:
        made.close()
    texts: Counter[str] = Counter()
    specs = [EpisodeSpec(task_id=task, split=name) for task in ids]
    for episode in rollout(specs, env, ExpertPolicy(), env_kwargs=env_kwargs):
        texts[episode.final_observation] += 1
        for turn in episode.turns:
            texts[turn.observation] += 1
            texts[turn.completion] += 1
            texts.update(turn.admissible or ())
    return texts


def make_tiny(folder: Path, size: Tiny, *, env: str, env_kwargs: Mapping[str, Any], split: str, seed: int) -> Path:
    """Writes an untrained model and its tokenizer to a folder, and returns it."""
    if size.hidden % size.heads or (size.hidden // size.heads) % 2:
        raise UsageError(f"tiny.hidden ({size.hidden}) must be an even multiple of tiny.heads ({size.heads})")
    tokenizer = make_tokenizer(
        collect_texts(env, env_kwargs, split, size.episodes), size.vocabulary, size.max_positions
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=size.hidden,
            intermediate_size=size.feed_forward,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            max_position_embeddings=size.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            initializer_range=0.05,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)  # whole, or not there
    return folder
