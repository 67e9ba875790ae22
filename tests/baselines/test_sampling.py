"""What is sampled with a cache that lives as long as its episode is what the model says without any cache."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentgym.episode import read_episodes
from tests.baselines.conftest import lines_of
from tests.policies.tiny_model import make_model, make_tokenizer
from tests.shared_data import need

need("torch")

from agentgym.policies import _kept  # noqa: E402
from agentgym.policies._generate import Completion, Row, generate  # noqa: E402
from agentgym.policies._kept import CachedSampler, keeps_cache  # noqa: E402
from agentgym.policies.hf import HFOptions, HFPolicy  # noqa: E402

END = {7, 11, 23, 42, 77}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of prompts that were fed, padding left out, one entry a row of each first forward."""
    fed: list[int] = []
    original = _kept._Page._run

    def run(self: Any, ids: Any, positions: Any, limit: Any, last: Any) -> Any:
        if last is not None:
            fed.extend((last + 1).tolist())
        return original(self, ids, positions, limit, last)

    with monkeypatch.context() as patch:
        patch.setattr(_kept._Page, "_run", run)
        yield fed


class Conversations:
    """Conversations whose prompts grow by their answers and by new text."""

    def __init__(self, sampler: CachedSampler, seed: int = 0, limit: int = 6) -> None:
        self.sampler = sampler
        self.limit = limit
        self.rng = np.random.default_rng(seed)
        self.ids: dict[Hashable, list[int]] = {}
        self.log: list[tuple[list[int], Completion]] = []
        self.turns: dict[Hashable, list[tuple[int, int]]] = {}  # length of prompt and answer

    def ask(self, keys: list[Hashable], temperature: float = 1.0, **options: Any) -> None:
        rows = []
        for key in keys:
            new = self.rng.integers(8, 300, self.rng.integers(1, 30)).tolist()
            self.ids[key] = [*self.ids.get(key, []), *new]
            rows.append(Row(self.ids[key], self.rng.random(int(self.rng.integers(1, self.limit + 1)))))
        answers = self.sampler.generate(keys, rows, temperature=temperature, end_ids=END, **options)
        for key, row, answer in zip(keys, rows, answers, strict=True):
            assert isinstance(answer, Completion), answer
            assert 0 < len(answer.ids) <= len(row.draws)
            self.log.append((list(row.ids), answer))
            self.turns.setdefault(key, []).append((len(row.ids), len(answer.ids)))
            self.ids[key] = [*row.ids, *answer.ids]

    def check(self, model: Any, temperature: float = 1.0) -> None:
        import torch

        for prompt, answer in self.log:
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([prompt + answer.ids])).logits[0, len(prompt) - 1 : -1]
            forced = torch.log_softmax(logits.float() / temperature, -1)
            expected = forced[torch.arange(len(answer.ids)), torch.tensor(answer.ids)]
            np.testing.assert_allclose(answer.logprobs, expected.numpy(), atol=1e-4)

    def new_tokens(self) -> int:
        """Tokens of prompts that a sampler must read which reads each token once."""
        read = 0
        for turns in self.turns.values():
            before = 0
            for prompt, answer in turns:
                read += prompt - before
                before = prompt + answer - 1  # the last token of an answer is sampled, but not read
        return read


@pytest.mark.parametrize("rows", [3, 32])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_with_the_kept_cache_are_those_of_teacher_forcing(
    rows: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    played = Conversations(CachedSampler(model, rows))
    with counted(monkeypatch) as fed:
        for turn in range(7):
            # Some end and some begin, so that rows leave and join pages that are in use, in changing order.
            keys: list[Hashable] = [f"a{i}" for i in range(8) if i >= turn]
            keys += [f"b{i}" for i in range(2 * turn)]
            played.rng.shuffle(keys)
            played.ask(keys, temperature)
            if turn < 8:
                played.sampler.forget(f"a{turn}")
    played.check(model, temperature)
    assert {len(answer.ids) for _, answer in played.log} == set(range(1, 7))  # rows end early and the batch shrinks
    assert sum(fed) == played.new_tokens()


def test_conversations_that_wait_for_their_turn_keep_their_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    played = Conversations(CachedSampler(model, 4))
    with counted(monkeypatch) as fed:
        for _ in range(4):  # two roles of one episode that speak in turn, and some that speak at times
            played.ask([(i, "left") for i in range(5)])
            played.ask([(i, "right") for i in range(5)])
            played.ask([(i, "left") for i in played.rng.choice(5, 2, replace=False)])
            played.ask([(i, side) for i in (0, 3) for side in ("left", "right")])
    played.check(model)
    assert sum(fed) == played.new_tokens()


def test_a_prompt_that_does_not_extend_the_last_one_starts_afresh() -> None:
    model = make_model()
    played = Conversations(CachedSampler(model, 4))
    for turn in range(6):
        played.ask(list("abcde"))
        for number, key in enumerate("abcde"):
            if turn % (number + 1) == 0:  # a window: the beginning is dropped
                played.ids[key] = played.ids[key][5 + number :]
    played.ids["a"] = played.ids["a"][:3]  # shorter than what is cached
    played.ask(list("abcde"))
    played.check(model)


def test_weights_that_changed_are_used_from_the_next_answer_on() -> None:
    import torch

    model = make_model().__class__(make_model().config)
    played = Conversations(CachedSampler(model, 4))
    played.ask(list("abc"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05)
    played.sampler.clear()
    played.log.clear()
    played.ask(list("abc"))
    played.check(model.eval())


def test_greedy_answers_and_stops_are_those_without_a_cache() -> None:
    model = make_model()
    rows = [Row([20 + i] * (2 * i + 1), np.full(8, 0.5)) for i in range(5)]
    options: dict[str, Any] = {"temperature": 0, "stopped": lambda ids: sum(ids) % 5 == 0}
    afresh = generate(model, rows, **options)
    kept = CachedSampler(model, 2).generate(list(range(5)), rows, **options)
    assert [answer.ids for answer in kept] == [answer.ids for answer in afresh]  # type: ignore[union-attr]


def test_the_cache_is_kept_only_where_every_layer_attends_to_everything() -> None:
    import transformers

    size = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    models = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**size), True),
        "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**size), True),
        "qwen2 sliding": (
            transformers.Qwen2ForCausalLM,
            transformers.Qwen2Config(**size, use_sliding_window=True, sliding_window=4, max_window_layers=0),
            False,
        ),
        "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig(**size, sliding_window=4), False),
        "mistral full": (
            transformers.MistralForCausalLM,
            transformers.MistralConfig(**size, sliding_window=None),
            True,
        ),
        "gemma3": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(**size, sliding_window=4), False),
        "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**size), True),
        "mamba": (
            transformers.MambaForCausalLM,
            transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4),
            False,
        ),
        "bloom": (
            transformers.BloomForCausalLM,
            transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2),
            False,
        ),
        "falcon alibi": (
            transformers.FalconForCausalLM,
            transformers.FalconConfig(
                vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, alibi=True
            ),
            False,
        ),
        "gpt2": (
            transformers.GPT2LMHeadModel,
            transformers.GPT2Config(
                vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0
            ),
            True,
        ),
    }
    for name, (kind, config, kept) in models.items():
        assert keeps_cache(kind(config)) is kept, name


@pytest.mark.parametrize("kept", [True, False])
def test_a_model_with_windows_or_learned_positions_samples_as_it_is_scored(kept: bool) -> None:
    """GPT-2 has a table of positions that padding must not leave; Mistral's window is shorter than the episodes."""
    import torch
    import transformers

    torch.manual_seed(0)
    size: dict[str, Any] = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.3}
    model: Any
    if kept:
        config = transformers.GPT2Config(**size, n_embd=16, n_layer=2, n_head=2, n_positions=90)
        model = transformers.GPT2LMHeadModel(config).eval()
    else:
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        mistral = transformers.MistralConfig(**size, **shape, num_key_value_heads=1, sliding_window=16)
        model = transformers.MistralForCausalLM(mistral).eval()
    assert keeps_cache(model) is kept
    rng = np.random.default_rng(0)
    policy = HFPolicy(model, make_tokenizer(), HFOptions(max_new_tokens=6))
    assert (policy._kept is not None) is kept
    ids = {number: rng.integers(8, 300, 2 + 30 * (number % 2)).tolist() for number in range(6)}
    for turn in range(3):
        if turn == 2:  # read beside rows that end near the last position
            ids[7] = rng.integers(8, 300, 60).tolist()
        rows = [Row(prompt, rng.random(2 + number)) for number, prompt in ids.items()]
        options: dict[str, Any] = {"temperature": 1.0, "end_ids": END}
        if policy._kept is not None:
            answers: Any = policy._kept.generate(list(ids), rows, **options)
        else:
            answers = policy._in_batches(rows, {**options, "top_p": None, "top_k": None, "stopped": None})
        for number, row, answer in zip(ids, rows, answers, strict=True):
            assert isinstance(answer, Completion), answer
            whole = [*row.ids, *answer.ids]
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([whole])).logits[0, len(row.ids) - 1 : -1]
            expected = torch.log_softmax(logits.float(), -1)[torch.arange(len(answer.ids)), torch.tensor(answer.ids)]
            np.testing.assert_allclose(answer.logprobs, expected.numpy(), atol=1e-4)
            ids[number] = [*whole, *rng.integers(8, 300, 1 + 2 * number).tolist()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.6},
        {"packing": True, "token_budget": 400},
        {"prompt": {"window": 2, "template": "chat"}},
        {"slots": 3},
        {"max_context": 80},
        {"env": "test/Duet-v0"},  # two roles of one policy
    ],
    ids=str,
)
def test_the_ratio_is_one_before_the_first_update(changes: dict[str, Any], small: Any, tmp_path: Path) -> None:
    from agentgym.baselines.core.trainer import train

    train(small(iterations=2, save_episodes=True, **changes), tmp_path)
    lines = [line for line in lines_of(tmp_path) if line["kind"] == "train"]
    assert [line["ratio"] for line in lines] == pytest.approx([1, 1], abs=1e-5)
    assert all(abs(line["approx_kl"]) < 1e-6 for line in lines)
    assert lines[0]["trained_tokens"] > 0
    episodes = read_episodes(tmp_path)
    afresh = [turn.kept_ids == 0 for episode in episodes for turn in episode.turns[1:]]
    assert any(afresh) is bool({"prompt", "max_context", "env"} & set(changes))
    overflown = any(turn.usage.get("context_overflow") for episode in episodes for turn in episode.turns)
    assert overflown is ("max_context" in changes)


def test_the_same_seed_plays_the_same_episodes_in_any_number_of_slots(small: Any, tmp_path: Path) -> None:
    from agentgym.baselines.core.trainer import train

    told = []
    for slots, backend in ((1, "serial"), (5, "serial"), (16, "serial"), (3, "threads")):
        out = tmp_path / f"{slots}{backend}"
        train(small(iterations=1, save_episodes=True, slots=slots, backend=backend, workers=slots), out)
        played = read_episodes(out, arrays=True)
        told.append([(e.episode_id, [t.arrays["completion_ids"].tolist() for t in e.turns]) for e in played])
        line = lines_of(out)[0]
        assert line["faults"] == 0
    assert told[0] == told[1] == told[2] == told[3]
    assert len({str(turns) for _, turns in told[0]}) > 8
    train(small(iterations=1, save_episodes=True, seed=1), tmp_path / "other")
    assert read_episodes(tmp_path / "other")[0].turns[0].completion != read_episodes(out)[0].turns[0].completion


def test_training_reads_no_token_of_an_episode_twice(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentgym.baselines.core.trainer import train

    fed_by_training: list[int] = []
    with counted(monkeypatch) as fed:

        def watch(line: dict[str, Any]) -> None:
            if line["kind"] == "train":
                fed_by_training.append(sum(fed))

        train(small(iterations=1, save_episodes=True, slots=5), tmp_path, watch=watch)
    wanted = 0
    for episode in read_episodes(tmp_path, arrays=True):
        assert all(turn.kept_ids for turn in episode.turns[1:])
        wanted += sum(len(turn.arrays["prompt_ids"]) for turn in episode.turns)
        wanted += len(episode.turns) - 1  # the last token of each answer is read with what follows it
    assert fed_by_training == [wanted]
