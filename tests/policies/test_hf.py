"""A transformers model as a policy: tokens as fed and sampled, exact log-probabilities, draws free of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentgym.episode import Episode
from agentgym.errors import InfrastructureError, UsageError
from agentgym.policies import _generate, _kept
from agentgym.policies._generate import Row, choose, generate
from agentgym.policies.base import Reply, make_policy
from agentgym.policies.hf import HFOptions, HFPolicy
from agentgym.rollout import EpisodeSpec, rollout
from agentgym.workers import make_backend
from tests.policies.fake_server import make_request
from tests.policies.tiny_model import TEMPLATES, make_model, make_tokenizer
from tests.shared_data import need

need("torch")

SPECS = [EpisodeSpec(task_id=f"count/{i:04}", repeat=i % 2) for i in range(6)]


def make(template: str = "chatml", context: int = 4096, **options: Any) -> HFPolicy:
    options = {"max_new_tokens": 12, **options}
    return HFPolicy(make_model(context), make_tokenizer(template), HFOptions(**options), label="tiny")


def play(policy: HFPolicy, slots: int, specs: list[EpisodeSpec] = SPECS) -> dict[str, Episode]:
    backend = make_backend("threads", slots)
    try:
        return {e.episode_id: e for e in rollout(specs, "test/Count-v0", policy, backend=backend)}
    finally:
        backend.close()


def sequences(episode: Episode) -> Iterator[tuple[list[int], list[int], Any]]:
    """Whole prompt, completion and log-probabilities of each turn, from the log."""
    whole: list[int] = []
    for turn in episode.turns:
        whole = whole[: turn.kept_ids] + turn.arrays["prompt_ids"].tolist()
        completion = turn.arrays["completion_ids"].tolist()
        yield list(whole), completion, turn.arrays["logprobs"]
        whole += completion


WAYS = ("kept", "afresh")  # the cache lives as long as its episode, or every prompt is encoded again


@contextmanager
def sampling(way: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        if way == "afresh":
            patch.setattr("agentgym.policies.hf.keeps_cache", lambda model: False)
        yield


@contextmanager
def spied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """Each list of ids that the model saw as a prompt, cached ones included; padding is left out."""
    fed: list[list[int]] = []
    afresh, kept = _generate._Decoder._forward, _kept._Page._run

    def forward(self: Any, ids: Any, positions: Any) -> None:
        if ids.shape[1] > 1:
            fed.extend(row[mask.bool()].tolist() for row, mask in zip(ids, self._mask, strict=True))
        afresh(self, ids, positions)

    def run(self: Any, ids: Any, positions: Any, limit: Any, last: Any) -> Any:
        if last is not None:
            for row, end, before in zip(ids.tolist(), last.tolist(), self._seen, strict=True):
                fed.append([*before, *row[: end + 1]])
        return kept(self, ids, positions, limit, last)

    with monkeypatch.context() as patch:
        patch.setattr(_generate._Decoder, "_forward", forward)
        patch.setattr(_kept._Page, "_run", run)
        yield fed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_log_holds_the_ids_that_the_model_was_fed(template: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with sampling(way, monkeypatch), spied(monkeypatch) as fed:
        episodes = play(make(template), 3)
    logged = [prompt for episode in episodes.values() for prompt, _, _ in sequences(episode)]
    assert len(logged) == 60
    assert sorted(fed) == sorted(logged)
    for episode in episodes.values():
        ends = [len(prompt) + len(completion) for prompt, completion, _ in sequences(episode)]
        assert [turn.kept_ids for turn in episode.turns] == [0, *ends[:-1]]  # only ever grows
        text = make_tokenizer(template).decode(list(sequences(episode))[-1][0])
        assert text.count("noise") == len(episode.turns)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_teacher_forcing(
    template: str, temperature: float, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    model = make_model()
    with sampling(way, monkeypatch):
        episodes = play(make(template, temperature=temperature, top_p=0.9), 3, SPECS[:3])
    for episode in episodes.values():
        for prompt, completion, logprobs in sequences(episode):
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            forced = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
            expected = forced[torch.arange(len(completion)), torch.tensor(completion)]
            np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-4)
            if temperature == 0:
                assert completion == forced.argmax(-1).tolist()


def test_answers_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(slots: int, way: str = "kept", **options: Any) -> dict[str, list[str]]:
        with sampling(way, monkeypatch):
            episodes = play(make(temperature=0.9, **options), slots)
        return {name: [turn.completion for turn in episode.turns] for name, episode in episodes.items()}

    alone = answers(1)
    assert answers(6) == alone
    assert answers(4, batch_size=3) == alone
    assert answers(4, "afresh", batch_size=3) == alone
    assert len({tuple(texts) for texts in alone.values()}) == len(SPECS)


def test_a_row_that_ends_leaves_and_the_others_go_on() -> None:
    model = make_model()
    draws = np.random.default_rng(1).random((4, 9))
    rows = [Row([10 + i] * (3 * i + 1), draws[i, : 9 - 2 * i]) for i in range(4)]
    together = generate(model, rows, temperature=1.0)
    assert [len(completion.ids) for completion in together] == [9, 7, 5, 3]
    for row, completion in zip(rows, together, strict=True):
        [alone] = generate(model, [row], temperature=1.0)
        assert alone.ids == completion.ids
        np.testing.assert_allclose(alone.logprobs, completion.logprobs, atol=1e-5)
    end = together[0].ids[2]
    [ended] = generate(model, rows[:1], temperature=1.0, end_ids={end})
    assert ended.ids == together[0].ids[: together[0].ids.index(end) + 1]


def test_generation_leaves_a_model_in_training_as_it_was() -> None:
    model = make_model().train()
    try:
        generate(model, [Row([5, 6], np.array([0.5]))], temperature=1.0)
        assert model.training
    finally:
        model.eval()


def test_tokens_are_drawn_from_the_restricted_distribution() -> None:
    import torch

    probabilities = torch.tensor([0.15, 0.4, 0.05, 0.3, 0.1])
    logits = probabilities.log().repeat(20_000, 1)
    draws = torch.tensor(np.random.default_rng(0).random((20_000, 1)))

    def shares(**options: Any) -> list[float]:
        tokens, logprobs = choose(
            logits, draws, options.pop("temperature", 1.0), **{"top_p": None, "top_k": None} | options
        )
        torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[0, tokens], atol=2, rtol=0)
        return [round(x, 2) for x in (torch.bincount(tokens, minlength=5) / len(tokens)).tolist()]

    assert shares() == pytest.approx([0.15, 0.4, 0.05, 0.3, 0.1], abs=0.011)
    assert shares(top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7, 0], abs=0.011)
    assert shares(top_p=0.71) == pytest.approx([0.15 / 0.85, 0.4 / 0.85, 0, 0.3 / 0.85, 0], abs=0.011)
    assert shares(top_p=0.01) == [0, 1, 0, 0, 0]
    assert shares(temperature=0.0) == [0, 1, 0, 0, 0]
    squared = (probabilities**2 / (probabilities**2).sum()).tolist()
    assert shares(temperature=0.5) == pytest.approx(squared, abs=0.011)


def test_no_draw_picks_a_token_without_weight() -> None:
    import torch

    logits = torch.tensor([[0.0, 1.0, -torch.inf], [-torch.inf, 0.0, 1.0]])
    for draw, wanted in ((0.0, [0, 1]), (1 - 2**-53, [1, 2])):
        tokens, logprobs = choose(logits, torch.full((2, 1), draw, dtype=torch.float64), 1.0, None, None)
        assert tokens.tolist() == wanted
        assert torch.isfinite(logprobs).all()


def test_a_stop_text_ends_the_answer_and_stays_in_it() -> None:
    request = make_request()
    [free] = make(max_new_tokens=60).submit([request])
    assert isinstance(free, Reply)
    text = free.text.replace("�", " ").split()[0][:2]
    [stopped] = make(max_new_tokens=60, stop=text).submit([make_request()])
    assert isinstance(stopped, Reply)
    assert stopped.completion_ids is not None
    assert free.completion_ids is not None
    count = len(stopped.completion_ids)
    assert count < len(free.completion_ids)
    assert stopped.completion_ids.tolist() == free.completion_ids[:count].tolist()
    assert text in stopped.text
    assert text not in make_tokenizer().decode(stopped.completion_ids[:-1], skip_special_tokens=True)


def test_an_episode_that_outgrows_the_model_is_a_failure_and_no_fault() -> None:
    [episode] = play(make(context=300), 1, SPECS[:1]).values()
    assert episode.outcome == "failure"
    overflown = [turn.usage.get("context_overflow", 0) for turn in episode.turns]
    assert overflown == sorted(overflown)
    assert 0 < sum(overflown) < 10
    for turn, over in zip(episode.turns, overflown, strict=True):
        assert (turn.completion == "" and not turn.arrays) if over else turn.arrays
    for prompt, completion, _ in sequences(
        Episode(
            **{
                **{n: getattr(episode, n) for n in ("episode_id", "task_id", "env", "seed", "outcome")},
                "turns": [turn for turn in episode.turns if turn.arrays],
            }
        )
    ):
        assert len(prompt) + len(completion) <= 300


@pytest.mark.parametrize("way", WAYS)
def test_lack_of_memory_is_a_fault_of_the_batch(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    with sampling(way, monkeypatch):
        policy = make(batch_size=2)
    calls = []

    def fail_once(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:
                raise torch.OutOfMemoryError("too much")
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr("agentgym.policies.hf.generate", fail_once(generate))
    monkeypatch.setattr(_kept._Page, "complete", fail_once(_kept._Page.complete))
    decisions = policy.submit([make_request(task=i) for i in range(4)])
    assert [isinstance(decision, InfrastructureError) for decision in decisions] == [True, True, False, False]
    assert "lower batch_size" in str(decisions[0])
    again = policy.submit([make_request(task=i) for i in range(2)])  # the broken page is gone, nothing else
    assert all(isinstance(decision, Reply) for decision in again)


def test_a_model_is_loaded_from_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    make_model().save_pretrained(folder)
    make_tokenizer("llama").save_pretrained(folder)
    policy = make_policy(f"hf:{folder}", max_new_tokens="4", temperature=0.5, stop="</action>", device="cpu")
    [reply] = policy.submit([make_request()])
    [same] = make("llama", max_new_tokens=4, temperature=0.5).submit([make_request()])
    assert isinstance(reply, Reply)
    assert isinstance(same, Reply)
    assert reply.text == same.text
    assert policy.describe() == {
        "name": "hf",
        "model": "tiny",
        "template": "chat",
        "admissible": True,
        "instructions": True,
        "dtype": "auto",
        "max_new_tokens": 4,
        "temperature": 0.5,
        "stop": "</action>",
        "logprob_temperature": 0.5,
    }
    policy.close()
    with pytest.raises(UsageError, match="cannot be used"):
        make_policy(f"hf:{folder}", device="cuda:99")


def test_bad_calls_are_refused(tmp_path: Path) -> None:
    for argument, options, message in [
        (None, {}, "name the model"),
        (str(tmp_path), {}, "no tokenizer at"),
        (str(tmp_path), {"temprature": 1}, "temperature"),
        (str(tmp_path), {"top_k": 0}, ">= 1"),
    ]:
        with pytest.raises(UsageError, match=message):
            make_policy("hf", argument=argument, **options)
