"""A language model for tests: a small random Llama and a byte-level tokenizer with three kinds of chat template."""

from __future__ import annotations

from functools import cache
from typing import Any

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|header|>{{ m['role'] }}<|/header|>\n\n{{ m['content'] | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
# Thoughts of earlier answers are dropped, white space is trimmed, an answer ends with a blank and the end of sequence.
FORGETFUL = (
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' %}"
    "{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "A: {{ text | trim }} {{ eos_token }}\n"
    "{% else %}{{ m['role'] | upper }}: {{ text | trim }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A: <think>\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "forgetful": FORGETFUL}
SPECIAL = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>", "<|eot|>"]


def make_tokenizer(template: str = "chatml", vocabulary: int = 300) -> Any:
    """A byte-level BPE with a few merges."""
    return _tokenizer(TEMPLATES.get(template, template), vocabulary)


@cache
def _tokenizer(template: str, vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["count is up down the user assistant system think action"] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = template
    return fast


@cache
def make_model(context: int = 4096) -> Any:
    """Hidden size 32, two layers, random weights; likes to end its answers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.4,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()
