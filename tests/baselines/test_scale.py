"""The arithmetic of docs/guides/scale.md: parameters as transformers counts them, tables as the script prints them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale_arithmetic import MODELS, Shape, memory, memory_table, shapes_table, time_table
from tests.shared_data import need

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "scale.md"


@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: shape.name)
def test_parameters_are_those_of_the_real_models(shape: Shape) -> None:
    need("torch")
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.feed_forward,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    model.tie_weights()
    assert shape.parameters == sum(value.numel() for value in model.parameters())


def test_the_guide_shows_what_the_script_prints() -> None:
    text = GUIDE.read_text()
    for table in (shapes_table(), memory_table(), time_table()):
        assert table in text
    assert "ever run on a GPU" in text


@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: shape.name)
def test_spreading_weights_saves_memory_and_one_gpu_has_nothing_to_spread_over(shape: Shape) -> None:
    one, eight, many = (memory(shape, gpus, "full, FSDP2, server") for gpus in (1, 8, 64))
    assert one.state == memory(shape, 1, "full, DDP").state == 16 * shape.parameters
    assert (eight.state, many.state) == (one.state / 8, one.state / 64)
    assert one.total > eight.total > many.total
