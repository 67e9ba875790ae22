"""TRL's GRPO loss and its gradient on a batch made by hand, to compare other implementations with.

`GRPOTrainer.compute_loss` hands its inputs to `_compute_loss`, which reads:

- inputs: prompt_ids, prompt_mask (padded on the left), completion_ids, completion_mask (on the right), advantages
  (rows,) or (rows, tokens); optionally tool_mask (rows, tokens; 1 where the model wrote), old_per_token_logps (else
  the current ones, detached) and ref_per_token_logps (needed for beta > 0); num_items_in_batch (a tensor) for "dapo";
- of the trainer: loss_type, importance_sampling_level, epsilon_low, epsilon_high, beta, temperature,
  max_completion_length (the divisor of "dr_grpo"), current_gradient_accumulation_steps (set by train() only);
- of its args: steps_per_generation, delta, use_bias_correction_kl.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from typing import Any, Literal

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo"]


def trl_grpo_loss(
    model: Any,
    tokenizer: Any,
    batch: dict[str, Any],
    *,
    loss_type: LossType,
    epsilon: float,
    epsilon_high: float,
    beta: float = 0.0,
    level: Literal["token", "sequence"] = "token",
    temperature: float = 1.0,
    max_completion_length: int | None = None,
    use_bias_correction_kl: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Loss and gradients as one update of `GRPOTrainer` would have them; the model is left as it is.

    Args:
        model: a causal language model without dropout.
        tokenizer: its tokenizer; unchanged.
        batch: tensors as listed above; num_items_in_batch may be left out.
        loss_type: how token losses are summed up.
        epsilon, epsilon_high: the ratio is clipped to [1 - epsilon, 1 + epsilon_high].
        beta: weight of the divergence from the reference, whose log-probabilities are batch["ref_per_token_logps"].
        level: ratios of tokens, or one a sequence (the geometric mean).
        temperature: of the log-probabilities.
        max_completion_length: divisor of "dr_grpo"; the width of completion_ids by default.
        use_bias_correction_kl: multiply the divergence by the ratio. TRL's own default is True; the published
            method's, and so this one's, is not.

    Returns:
        The loss, detached, and the gradient of each parameter by name.
    """
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    inputs = {"num_items_in_batch": mask.sum(), **batch}
    length = batch["completion_ids"].shape[1] if max_completion_length is None else max_completion_length
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            copy.deepcopy(model),
            copy.deepcopy(tokenizer),
            folder,
            loss_type=loss_type,
            epsilon=epsilon,
            epsilon_high=epsilon_high,
            importance_sampling_level=level,
            temperature=temperature,
            max_completion_length=length,
            use_bias_correction_kl=use_bias_correction_kl,
            per_device_train_batch_size=len(mask),
            num_generations=len(mask),
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.beta = beta  # set late: a trainer made with beta > 0 loads a reference model, which is not needed
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        named = {name: value for name, value in trainer.model.named_parameters() if value.requires_grad}
        return loss.detach(), {name: value.grad.clone() for name, value in named.items() if value.grad is not None}


def make_trainer(model: Any, tokenizer: Any, folder: str, *, rows: Any = None, **options: Any) -> Any:
    """A `GRPOTrainer` on the CPU without progress bars; `rollout_func` and `reward_funcs` may be among the options."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rewards = options.pop("reward_funcs", lambda completions, **_: [0.0] * len(completions))
    rollout_func = options.pop("rollout_func", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            **options,
        )
        return GRPOTrainer(
            model,
            reward_funcs=rewards,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": "none"}]) if rows is None else rows,
            processing_class=tokenizer,
            rollout_func=rollout_func,
        )
