"""SmolLM2-135M goes through the trainer as any other model: scored as it is, then one real LoRA update."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shared_data import need

need("torch")
need("smollm2")


@pytest.mark.slow
def test_it_plays_as_it_is_and_takes_a_lora_update(tmp_path: Path) -> None:
    from agentgym.baselines.core.config import make_train_config
    from agentgym.baselines.core.models import trainable
    from agentgym.baselines.core.record import read_metrics
    from agentgym.baselines.core.trainer import Trainer

    config = make_train_config(
        {
            "method": "grpo",
            "method_options": {"group_size": 2, "invalid_penalty": 0.1, "scale": False},
            "env_kwargs": {"tasks": "alfworld/generated:xs", "max_turns": 2},
            "model": "smollm2-135m",
            "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]},
            "iterations": 1,
            "tasks_per_iteration": 2,
            "max_new_tokens": 8,
            "slots": 4,
            "prompt": {"system": "Act by short commands.", "instructions": False},
            "evaluation": {"every": 1, "episodes": 2, "final": 2, "greedy": False},
        }
    )
    trainer = Trainer(config, tmp_path / "run")
    learner = trainer.learners["policy"]
    names = set(trainable(learner.plain.lm))
    assert names, "nothing is trained"
    assert all("lora_" in name for name in names)
    trainer.run()
    lines = read_metrics(tmp_path / "run")
    assert [line["kind"] for line in lines] == ["eval", "train", "eval"]
    zero, update, _ = lines
    assert zero["episodes"] == 2
    assert update["faults"] == 0
    assert update["grad_norm"] >= 0.0
    assert update["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file()
