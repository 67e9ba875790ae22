"""A vLLM server by tokens, against a stand-in that speaks its protocol."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentgym.errors import InfrastructureError, UsageError
from agentgym.policies.base import Policy, Reply, make_policy
from agentgym.policies.vllm import VLLMOptions, VLLMPolicy
from agentgym.rollout import EpisodeSpec, rollout
from agentgym.workers import make_backend
from tests.policies.fake_server import Answer, FakeServer, Handler, dies, gives, make_request, serve
from tests.policies.tiny_model import TEMPLATES, make_tokenizer
from tests.shared_data import need

need("torch")

made: list[Policy] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while made:
        made.pop().close()


def policy_at(server: FakeServer, template: str = "chatml", **options: Any) -> VLLMPolicy:
    quick: dict[str, Any] = {"backoff": 0.01, "attempts": 2, "timeout": 5.0, "max_tokens": 8}
    policy = VLLMPolicy("tiny", make_tokenizer(template), VLLMOptions(base_url=server.url, **{**quick, **options}))
    made.append(policy)
    return policy


def ask(policy: Policy, task: int = 0) -> Reply:
    [future] = policy.submit([make_request(task=task)])
    assert not isinstance(future, Reply | BaseException)
    return future.result(20)


def sampled(body: dict[str, Any]) -> tuple[list[int], list[float]]:
    """What the stand-in samples: a function of the seed it is sent."""
    draws = random.Random(body["seed"])
    ids = [draws.randrange(8, 300) for _ in range(draws.randrange(1, body["max_tokens"]))]
    if draws.random() < 0.5:
        ids.append(draws.choice(body["stop_token_ids"]))
    return ids, [-round(draws.random(), 3) for _ in ids]


def completion(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """An answer of vLLM; `changes` replace fields of its choice, None leaves them out."""
    ids, logprobs = sampled(body)
    choice = {
        "index": 0,
        "text": "not what counts",
        "token_ids": ids,
        "prompt_token_ids": body["prompt"],
        "logprobs": {"tokens": [""] * len(ids), "token_logprobs": logprobs},
        "finish_reason": "stop",
    }
    choice = {name: value for name, value in {**choice, **changes}.items() if value is not None}
    return {
        "choices": [choice],
        "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)},
    }


def samples(handler: Handler, body: dict[str, Any]) -> None:
    handler.reply(completion(body))


def changed(**changes: Any) -> Answer:
    return lambda handler, body: handler.reply(completion(body, **changes))


def test_a_request_asks_for_ids_and_says_all_of_the_sampling() -> None:
    with serve(samples) as server:
        policy = policy_at(server, temperature=0.5, top_p=0.9, top_k=20, stop="</action>")
        policy.version = 3
        reply = ask(policy)
        [body] = server.bodies
    assert server.paths == ["/v1/completions"]
    assert body["return_token_ids"] is True
    assert (body["temperature"], body["top_p"], body["top_k"], body["max_tokens"]) == (0.5, 0.9, 20, 8)
    assert body["stop"] == ["</action>"]
    assert body["prompt"] == reply.prompt_ids.tolist()  # type: ignore[union-attr]
    ids, logprobs = sampled(body)
    assert reply.completion_ids is not None
    assert reply.completion_ids.tolist() == ids
    np.testing.assert_allclose(reply.logprobs, logprobs, atol=1e-6)  # type: ignore[arg-type]
    assert reply.text == make_tokenizer().decode(ids, skip_special_tokens=True)
    assert reply.policy_version == 3
    assert (reply.usage["prompt_tokens"], reply.usage["completion_tokens"]) == (len(body["prompt"]), len(ids))


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_log_holds_the_ids_that_were_sent_and_sampled(template: str) -> None:
    with serve(samples) as server:
        backend = make_backend("threads", 3)
        specs = [EpisodeSpec(task_id="count/0000", seed=seed) for seed in range(4)]  # no two prompts are alike
        try:
            episodes = list(rollout(specs, "test/Count-v0", policy_at(server, template), backend=backend))
        finally:
            backend.close()
        sent = [body["prompt"] for body in server.bodies]
        said = {tuple(body["prompt"]): sampled(body) for body in server.bodies}
    logged = []
    for episode in episodes:
        whole: list[int] = []
        for turn in episode.turns:
            assert turn.kept_ids == len(whole)  # only ever grows
            whole += turn.arrays["prompt_ids"].tolist()
            logged.append(list(whole))
            ids, logprobs = said[tuple(whole)]
            assert turn.arrays["completion_ids"].tolist() == ids
            np.testing.assert_allclose(turn.arrays["logprobs"], logprobs, atol=1e-6)
            whole += ids
    assert len(logged) == 40
    assert sorted(logged) == sorted(sent)


NO_SENSE: dict[str, Answer] = {
    "html": gives(b"<html>"),
    "no choices": gives({"choices": []}),
    "no ids": changed(token_ids=[]),
    "text as ids": changed(token_ids=["up"]),
    "true as an id": changed(token_ids=[True]),
    "negative id": changed(token_ids=[-1]),
    "huge id": changed(token_ids=[2**40]),
    "no logprobs": changed(logprobs=None),
    "too few logprobs": changed(token_ids=[20, 21, 22], logprobs={"token_logprobs": [-1.0]}),
    "null logprob": changed(token_ids=[20], logprobs={"token_logprobs": [None]}),
    "positive logprob": changed(token_ids=[20], logprobs={"token_logprobs": [1.5]}),
    "hangs up": dies,
}


@pytest.mark.parametrize("kind", NO_SENSE)
def test_nonsense_is_a_fault_after_retries_and_forgiven_once(kind: str) -> None:
    with serve(NO_SENSE[kind], samples, NO_SENSE[kind]) as server:
        policy = policy_at(server)
        assert ask(policy).usage["retries"] == 1.0
        with pytest.raises(InfrastructureError, match="after 2 tries"):
            ask(policy, task=1)
    assert len(server.bodies) == 4


def test_one_nonsense_answer_is_the_fault_of_its_episode_alone() -> None:
    tokenizer = make_tokenizer()

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        # The first observation shows a number that differs between seeds.
        bad = spoilt in tokenizer.decode(body["prompt"])
        handler.reply(b"<html>" if bad else completion(body))

    spoilt = "never"
    specs = [EpisodeSpec(task_id="count/0000", seed=seed) for seed in range(4)]
    with serve(answer) as server:
        healthy = {e.seed: e for e in rollout(specs, "test/Count-v0", policy_at(server))}
        spoilt = healthy[2].turns[4].observation
        episodes = {e.seed: e for e in rollout(specs, "test/Count-v0", policy_at(server))}
    broken = episodes.pop(2)
    assert (broken.outcome, broken.cause, len(broken.turns)) == ("fault", "infrastructure", 4)
    assert all(
        [turn.completion for turn in episode.turns] == [turn.completion for turn in healthy[seed].turns]
        for seed, episode in episodes.items()
    )


def test_a_server_that_cuts_the_prompt_is_found_out() -> None:
    with serve(changed(prompt_token_ids=[1, 2, 3])) as server, pytest.raises(InfrastructureError, match="another prom"):
        ask(policy_at(server))
    assert len(server.bodies) == 1


def test_a_server_that_knows_no_token_ids_ends_the_run_at_once() -> None:
    with serve(changed(token_ids=None)) as server, pytest.raises(UsageError, match=r"vLLM 0\.10\.2"):
        list(rollout([EpisodeSpec(task_id="count/0000")], "test/Count-v0", policy_at(server)))
    assert len(server.bodies) == 1


def test_an_episode_that_outgrows_the_model_is_no_fault() -> None:
    with serve(samples) as server:
        policy = policy_at(server, max_context=300)
        [episode] = rollout([EpisodeSpec(task_id="count/0000")], "test/Count-v0", policy)
        assert all(len(body["prompt"]) + body["max_tokens"] <= 300 for body in server.bodies)
    over = [turn.usage.get("context_overflow", 0.0) for turn in episode.turns]
    assert episode.outcome == "failure"
    assert over == sorted(over)
    assert 0 < sum(over) < 10
    full = gives({"error": {"message": "This model's maximum context length is 4096 tokens."}}, 400)
    with serve(samples, full) as server:
        policy = policy_at(server)
        ask(policy)
        reply = ask(policy, task=1)
    assert (reply.text, reply.completion_ids, reply.usage) == ("", None, {"context_overflow": 1.0})


def test_the_description_names_no_address_and_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny-tokenizer"
    make_tokenizer().save_pretrained(folder)
    monkeypatch.setenv("TEST_KEY", "sk-very-secret")
    with serve(samples) as server:
        options = {"base_url": server.url, "tokenizer": str(folder), "api_key_env": "TEST_KEY"}
        policy = make_policy("vllm:org/tiny", temperature="0.7", **options)
        made.append(policy)
        ask(policy)
        assert server.authorizations == ["Bearer sk-very-secret"]
    described = policy.describe()
    assert (described["model"], described["tokenizer"], described["temperature"]) == ("org/tiny", "tiny-tokenizer", 0.7)
    assert described["logprob_temperature"] == 1.0
    for hidden in ("127.0.0.1", "secret", str(tmp_path), "TEST_KEY"):
        assert hidden not in json.dumps(described)
    processed = policy_at(server, temperature=0.7, logprobs_mode="processed_logprobs")
    assert processed.describe()["logprob_temperature"] == 0.7


def test_bad_calls_are_refused(tmp_path: Path) -> None:
    base = {"base_url": "http://127.0.0.1:9/v1"}
    for argument, options, message in [
        (None, base, "name the server's model"),
        ("m", {**base, "tokenizer": str(tmp_path)}, "no tokenizer at"),
        ("m", {**base, "temprature": 1}, "temperature"),
        ("m", {**base, "logprobs_mode": "all"}, "logprobs_mode"),
    ]:
        with pytest.raises(UsageError, match=message):
            make_policy("vllm", argument=argument, **options)
