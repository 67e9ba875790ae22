"""Loading models: "tiny", "smollm2-135m", a folder or a hub id; adapters on top."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agentgym.baselines.core.config import LoRA, TrainConfig
from agentgym.errors import DataError, UsageError, require_extra
from agentgym.policies._tokens import load_tokenizer
from agentgym.policies.hf import load_model

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def model_folder(config: TrainConfig, out: Path) -> str:
    """Folder or hub id of the model to start from; the tiny one is made in `out`."""
    if config.model == "tiny":
        from agentgym.baselines.core.tiny import make_tiny

        folder = out / "tiny"
        if not (folder / "tokenizer.json").exists():
            make_tiny(
                folder,
                config.tiny,
                env=config.env,
                env_kwargs=config.env_kwargs,
                split=config.train_split,
                seed=config.seed,
            )
        return str(folder)
    if config.model == "smollm2-135m":
        from agentgym.baselines.core.smollm2 import smollm2_folder

        return str(smollm2_folder())
    return config.model


def load(name: str, *, dtype: str = "fp32", device: str = "auto") -> tuple[Any, Any]:
    """A model and its tokenizer.

    Args:
        name: folder or hub id.
        dtype: "fp32", "bf16" or "fp16", of the weights.
        device: see `agentgym.policies.hf.load_model`.
    """
    try:
        model = load_model(name, device=device, dtype=DTYPES[dtype])
    except Exception as error:
        if "safetensor" in f"{type(error).__name__} {error}".lower() and Path(name).is_dir():
            mend = "Remove this checkpoint's folder, then an older one is used; or restore it from a copy"
            raise DataError(name, f"its weights cannot be read ({error})", mend) from error
        raise
    return model, load_tokenizer(name)


def add_lora(model: Any, options: LoRA, *, adapter: str = "default") -> Any:
    """Freezes a model and puts trainable low-rank adapters on it.

    Args:
        model: a causal language model, or a peft model that gets one more adapter.
        options: see `LoRA`.
        adapter: its name.
    """
    peft = require_extra("peft", extra="train")
    settings = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=list(options.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        if isinstance(model, peft.PeftModel):
            model.add_adapter(adapter, settings)
            return model
        return peft.get_peft_model(model, settings, adapter_name=adapter)
    except ValueError as error:
        raise UsageError(f"lora.targets {list(options.targets)} do not fit this model: {error}") from error


def trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that an update changes, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def save_model(model: Any, tokenizer: Any, folder: Path, adapter: str = "") -> None:
    """Writes a model, or its adapters alone (`adapter`: of several, this one), as a folder that loads by its path."""
    if adapter:
        model.save_pretrained(folder, selected_adapters=[adapter])
        for file in (folder / adapter).iterdir():  # peft puts a named adapter into a folder of its own
            file.replace(folder / file.name)
        (folder / adapter).rmdir()
    else:
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
