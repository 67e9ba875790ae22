"""Training with a vLLM server that samples: it always answers with the weights of the last update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.baselines.conftest import lines_of
from tests.baselines.test_weight_push import FakeVLLM, Runner, Served
from tests.policies.fake_server import dies, serve
from tests.shared_data import need

need("torch")

Make = Callable[..., Any]


class Sampling(FakeVLLM):
    """The stand-in, sampling for real from the model that was pushed to it."""

    def completions(self, body: Any) -> Any:
        import numpy as np

        from agentgym.policies._generate import Row, generate

        if "seed" not in body:  # the push asks for the probe's log-probabilities
            return super().completions(body)
        model = self.workers[0].model_runner.model.lm
        draws = np.random.default_rng(body["seed"]).random(body["max_tokens"])
        rows = [Row(body["prompt"], draws)]
        [answer] = generate(model, rows, temperature=body["temperature"], end_ids=set(body["stop_token_ids"]))
        choice = {"token_ids": answer.ids, "logprobs": {"token_logprobs": answer.logprobs}, "finish_reason": "stop"}
        return {"choices": [{**choice, "text": "", "prompt_token_ids": body["prompt"]}], "usage": {}}


@pytest.fixture
def server(cold_start: str, monkeypatch: pytest.MonkeyPatch) -> Sampling:
    """A stand-in that serves a model of the cold start's shape, with other weights."""
    import torch
    from transformers import AutoModelForCausalLM

    def blank(self: Any) -> None:
        self.lm = AutoModelForCausalLM.from_pretrained(cold_start).requires_grad_(False)
        with torch.no_grad():
            for parameter in self.lm.parameters():
                parameter.mul_(0.5)

    monkeypatch.setattr(Served, "__init__", blank)
    return Sampling(1, Runner)


def test_each_iteration_is_sampled_by_the_weights_of_the_update_before(
    server: Sampling, small: Make, tmp_path: Path
) -> None:
    from agentgym.baselines.core.trainer import train

    with serve(server) as http:
        table = {"base_url": http.url, "model": "served", "weights": str(tmp_path / "weights")}
        train(small(iterations=3, server=table, optimiser={"lr": 1e-2}), tmp_path / "run")
    lines = [line for line in lines_of(tmp_path / "run") if line["kind"] == "train"]
    # Log-probabilities of the server are the trainer's own: without a push they would be those of other weights.
    assert [line["ratio"] for line in lines] == pytest.approx([1.0] * 3, abs=1e-4)
    assert [line["faults"] for line in lines] == [0, 0, 0]
    assert lines[0]["grad_norm"] > 0


def test_a_server_that_dies_costs_what_it_was_asked_and_nothing_is_invented(
    server: Sampling, small: Make, tmp_path: Path
) -> None:
    from agentgym.baselines.core.trainer import train

    answers = [0]

    def dying(handler: Any, body: Any) -> None:
        answers[0] += "seed" in (body or {})
        if "seed" in (body or {}) and 20 < answers[0] < 60:
            dies(handler, body)
        else:
            server(handler, body)

    with serve(dying) as http:
        table = {"base_url": http.url, "model": "served", "weights": str(tmp_path / "weights")}
        train(small(iterations=1, retries=0, server=table), tmp_path / "run")
    [line] = [line for line in lines_of(tmp_path / "run") if line["kind"] == "train"]
    assert line["faults"] == line["lost"]
    assert line["played"] + line["lost"] == 16
