"""TRL's GRPOTrainer on ALFWorld, small enough for a laptop's CPU.

An expert plays some generated games; a tiny new model imitates its conversations for a moment (SFTTrainer), then
learns from whole episodes of its own (GRPOTrainer). For a real model, give `--model` a folder or hub id with a chat
template; the imitation is left out then. It shows how the parts fit together, in two to five minutes; a result needs
far more episodes.

    pip install 'agentgym-suite[trl]'
    OMP_NUM_THREADS=1 python examples/trl_grpo.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from agentgym.evaluate import evaluate, plan
from agentgym.integrations.trl import make_rollout_func, reward_from_env, sft_rows, task_dataset
from agentgym.prompts import PromptConfig

ENV = "agentgym/ALFWorld-v0"
ENV_KWARGS = {"tasks": "alfworld/generated:xs", "max_turns": 16}
PROMPT = {"system": "", "instructions": False, "admissible": False}  # short, for a model that knows only this game
# The assistant's part is marked, so that SFTTrainer can leave the observations out of the loss.
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<act>{% generation %}{{ m['content'] }}<end>"
    "{% endgeneration %}{% else %}<obs>{{ m['content'] }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<act>{% endif %}"
)


def play_expert(run: Path, games: int) -> list[dict[str, Any]]:
    """Conversations of the expert with the environment."""
    config = plan(ENV, env_kwargs=ENV_KWARGS, split="train", episodes=games)
    evaluate(config, "expert", run, backend="serial")
    return [{"messages": row["messages"]} for row in sft_rows(run, prompt=PromptConfig(**PROMPT))]


def make_tokenizer(rows: list[dict[str, Any]]) -> Any:
    """One token a word of these conversations."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<end>", "<obs>", "<act>"]
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = (message["content"] for row in rows for message in row["messages"])
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=special, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        additional_special_tokens=["<obs>", "<act>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: Any) -> Any:
    """A Llama of 0.1 million random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=1024,
            initializer_range=0.05,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def imitate(model: Any, tokenizer: Any, rows: list[dict[str, Any]], steps: int, out: str) -> None:
    """Supervised training on the expert's answers."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        output_dir=out,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        warmup_steps=10,
        max_length=1024,
        assistant_only_loss=True,
        logging_steps=max(1, steps // 5),
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    SFTTrainer(model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer).train()


def reinforce(model: Any, tokenizer: Any, steps: int, out: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """GRPO on whole episodes; returns the trainer's log."""
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=out,
        max_steps=steps,
        per_device_train_batch_size=64,
        num_generations=8,
        learning_rate=2e-4,
        loss_type="dapo",
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=reward_from_env,
        args=args,
        train_dataset=task_dataset(ENV, env_kwargs=ENV_KWARGS, split="train", limit=512),
        processing_class=tokenizer,
        rollout_func=make_rollout_func(ENV, env_kwargs=ENV_KWARGS, **options),
    )
    trainer.train()
    log: list[dict[str, Any]] = trainer.state.log_history
    return log


def main() -> None:
    """Reads the command line, trains, and prints one line a step."""
    parser = argparse.ArgumentParser(description="GRPO with TRL on generated ALFWorld games")
    parser.add_argument("--model", help="folder or hub id; default: a tiny model, made and taught here")
    parser.add_argument("--steps", type=int, default=10, help="steps of GRPO")
    parser.add_argument("--imitation-steps", type=int, default=1000, help="steps of imitation for the tiny model")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.model:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            model = AutoModelForCausalLM.from_pretrained(given.model)
            tokenizer = AutoTokenizer.from_pretrained(given.model)
            options: dict[str, Any] = {"max_new_tokens": 64, "max_context": 4096}
        else:
            rows = play_expert(Path(folder, "expert"), games=max(64, 4 * given.imitation_steps))
            tokenizer = make_tokenizer(rows)
            model = make_model(tokenizer)
            imitate(model, tokenizer, rows, given.imitation_steps, folder)
            options = {"max_new_tokens": 8, **PROMPT}
        for line in reinforce(model, tokenizer, given.steps, folder, options):
            if "reward" in line:
                print(
                    f"step {line['step']}: reward {line['reward']:.3f}, success {line['env/success']:.2f}, "
                    f"turns {line['env/turns']:.1f}, loss {line['loss']:.4f}, grad norm {line['grad_norm']:.3f}"
                )


if __name__ == "__main__":
    main()
