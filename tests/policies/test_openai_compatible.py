"""Chat completions over HTTP: what a healthy server gets, and what becomes of every way of failing."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from agentgym.actions import ToolSpec, get_format
from agentgym.errors import InfrastructureError, UsageError
from agentgym.policies.base import Context, Policy, Reply, Request, make_policy
from agentgym.policies.openai_compatible import native_messages, read_text
from agentgym.rollout import EpisodeSpec, rollout
from agentgym.workers import make_backend
from tests.policies.fake_server import (
    FakeServer,
    Handler,
    chat_answer,
    dies,
    drips,
    gives,
    hangs,
    make_request,
    says,
    serve,
)

QUICK: dict[str, Any] = {"backoff": 0.01, "attempts": 2, "timeout": 5.0}
made: list[Policy] = []


def policy_at(server: FakeServer | str, **options: Any) -> Policy:
    url = server if isinstance(server, str) else server.url
    policy = make_policy("openai_compatible:tiny", base_url=url, **{**QUICK, **options})
    made.append(policy)
    return policy


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while made:
        made.pop().close()


def ask(policy: Policy, request: Request | None = None) -> Reply:
    [future] = policy.submit([request or make_request()])
    assert not isinstance(future, Reply | BaseException)
    return future.result(20)


def test_a_request_holds_prompt_and_sampling_options() -> None:
    with serve(says("up")) as server:
        policy = policy_at(server, temperature=0.5, top_p=0.9, max_tokens=7, price_prompt=2.0, price_completion=10.0)
        reply = ask(policy)
    assert reply.text == "up"
    assert reply.usage == {
        "calls": 1.0,
        "prompt_tokens": 1000.0,
        "completion_tokens": 20.0,
        "cost": pytest.approx(0.0022),
    }
    [body] = server.bodies
    assert server.paths == ["/v1/chat/completions"]
    assert body["model"] == "tiny"
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.5, 0.9, 7)
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["messages"] == reply.messages
    assert server.authorizations == [None]
    assert policy.describe() == {
        "name": "openai_compatible",
        "model": "tiny",
        "template": "chat",
        "admissible": True,
        "instructions": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
        "native_tools": True,
        "send_seed": True,
        "max_tokens_field": "max_tokens",
    }


def test_seeds_depend_on_episode_and_turn_alone() -> None:
    with serve(says("up")) as server:
        first = policy_at(server)
        for task in (0, 1, 0):
            ask(first, make_request(task=task))
        ask(policy_at(server), make_request(task=1))
    seeds = [body["seed"] for body in server.bodies]
    assert seeds[0] == seeds[2] != seeds[1] == seeds[3]


def test_the_key_comes_from_the_named_variable_and_shows_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", "sk-very-secret")
    with serve(says("up"), gives({"error": "bad key sk-very-secret"}, 400)) as server:
        policy = policy_at(server, api_key_env="TEST_KEY")
        ask(policy)
        with pytest.raises(InfrastructureError, match="HTTP 400") as caught:
            ask(policy)
        assert server.authorizations == ["Bearer sk-very-secret"] * 2
    assert "secret" not in str(caught.value)
    assert "secret" not in json.dumps(policy.describe())
    assert "127.0.0.1" not in json.dumps(policy.describe()) + str(caught.value)
    with pytest.raises(UsageError, match="NO_SUCH_KEY"):
        policy_at(server, api_key_env="NO_SUCH_KEY")


@pytest.mark.parametrize(
    ("argument", "options", "message"),
    [
        (None, {"base_url": "http://x/v1"}, "name the server's model"),
        ("m", {}, "no server"),
        ("m", {"base_url": "ftp://x"}, "no server"),
        ("m", {"base_url": "http://x", "temprature": 1}, "temperature"),
        ("m", {"base_url": "http://x", "temperature": -1}, ">= 0"),
        ("m", {"base_url": "http://x", "max_in_flight": 0}, ">= 1"),
        ("m", {"base_url": "http://x", "template": "no.such:template"}, "no.such"),
    ],
)
def test_bad_options_are_refused(
    monkeypatch: pytest.MonkeyPatch, argument: str | None, options: dict[str, Any], message: str
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(UsageError, match=message):
        make_policy("openai_compatible" + (f":{argument}" if argument else ""), **options)


def test_numbers_may_come_as_text() -> None:
    policy = policy_at("http://127.0.0.1:9/v1", temperature="0.25", window="2", admissible="false")
    described = policy.describe()
    assert (described["temperature"], described["window"], described["admissible"]) == (0.25, 2, False)


# Servers that fail.


def test_connection_refused_is_a_fault() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(InfrastructureError, match="cannot be reached or died"):
        ask(policy_at(f"http://127.0.0.1:{port}/v1"))


NO_SENSE: dict[str, Any] = {
    "html": gives(b"<html><body>Bad gateway</body></html>"),
    "no json object": gives([1, 2]),
    "no choices": gives({"object": "chat.completion"}),
    "empty choices": gives({"choices": []}),
    "choices of a wrong type": gives({"choices": {"0": {}}}),
    "choice of a wrong type": gives({"choices": ["up"]}),
    "no message": gives({"choices": [{"text": "up"}]}),
    "null content": gives(chat_answer(None)),
    "number as content": gives(chat_answer(3)),
    "parts as content": gives(chat_answer([{"type": "text", "text": "up"}])),
    "not utf-8": gives(b'{"choices": "\xff"}'),
    "lone surrogate": gives(b'{"choices": [{"message": {"content": "\\ud800"}}]}'),
    "deep nesting": gives(b"[" * 100_000),
    "empty body": gives(b""),
    "hangs up": dies,
    "always 503": gives({"error": "loading"}, 503),
}


@pytest.mark.parametrize("kind", NO_SENSE)
def test_nonsense_becomes_a_fault_after_retries(kind: str) -> None:
    with serve(NO_SENSE[kind]) as server, pytest.raises(InfrastructureError, match="after 2 tries"):
        ask(policy_at(server))
    assert len(server.bodies) == 2


@pytest.mark.parametrize("kind", NO_SENSE)
def test_a_server_that_recovers_is_forgiven(kind: str) -> None:
    with serve(NO_SENSE[kind], says("up")) as server:
        reply = ask(policy_at(server))
    assert reply.text == "up"
    assert reply.usage["retries"] == 1.0


@pytest.mark.parametrize("slow", [hangs, drips])
def test_the_time_limit_covers_the_whole_try(slow: Any) -> None:
    began = time.monotonic()
    with serve(slow) as server:
        policy = policy_at(server, timeout=0.3, attempts=1)
        with pytest.raises(InfrastructureError, match=r"no whole answer in 0\.3 s"):
            ask(policy)
        assert time.monotonic() - began < 1.5


def test_retry_after_is_honoured() -> None:
    with serve(gives({}, 429, Retry_After="0.4"), says("up")) as server:
        began = time.monotonic()
        assert ask(policy_at(server)).text == "up"
        assert 0.4 <= time.monotonic() - began < 3


def test_a_request_refused_for_good_is_not_repeated() -> None:
    with serve(says("up"), gives({"error": "no such field"}, 400)) as server:
        policy = policy_at(server)
        ask(policy)
        with pytest.raises(InfrastructureError, match="no such field"):
            ask(policy)
    assert len(server.bodies) == 2


TOO_LONG = [
    {"error": {"code": "context_length_exceeded", "message": "This model's maximum context length is 8192 tokens."}},
    {"object": "error", "message": "The input (99 tokens) is longer than the model's context length (64 tokens)."},
    {"error": {"type": "exceed_context_size_error", "message": "exceeds the available context size"}},
    {"error": {"message": "prompt is too long: 99 tokens > 64 maximum"}},
]


@pytest.mark.parametrize("body", TOO_LONG)
def test_an_episode_that_outgrows_the_model_is_a_failure_and_no_fault(body: dict[str, Any]) -> None:
    with serve(says("up"), gives(body, 400)) as server:
        [episode] = rollout([EpisodeSpec(task_id="count/0000")], "test/Count-v0", policy_at(server))
    assert (episode.outcome, episode.cause) == ("failure", "turn limit")
    assert [turn.completion for turn in episode.turns] == ["up"] + [""] * 9
    assert episode.usage["agent"]["context_overflow"] == 9
    assert len(server.bodies) == 10


def test_a_first_prompt_that_does_not_fit_ends_the_run_at_once() -> None:
    with serve(gives(TOO_LONG[0], 400)) as server, pytest.raises(UsageError, match="lower max_tokens"):
        list(rollout([EpisodeSpec(task_id="count/0000")], "test/Count-v0", policy_at(server)))


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_model_ends_the_run_at_once(status: int) -> None:
    with serve(gives({"error": "no such model"}, status)) as server:
        with pytest.raises(UsageError, match="Check the model's name"):
            list(rollout([EpisodeSpec(task_id="count/0000")], "test/Count-v0", policy_at(server)))
        assert len(server.bodies) == 1


# Many requests.


def test_requests_run_together_up_to_the_bound() -> None:
    with serve(says("up", delay=0.1)) as server:
        policy = policy_at(server, max_in_flight=4)
        futures = policy.submit([make_request(task=i) for i in range(12)])
        assert [future.result(20).text for future in futures] == ["up"] * 12  # type: ignore[union-attr]
        assert server.most == 4


def test_finish_and_close_cancel_what_is_under_way() -> None:
    with serve(hangs) as server:
        policy = policy_at(server)
        one, two = policy.submit([make_request(task=0), make_request(task=1)])
        policy.finish("count/0000#0#0")
        assert one.cancelled()  # type: ignore[union-attr]
        policy.close()
        assert two.cancelled()  # type: ignore[union-attr]


def test_one_nonsense_answer_is_the_fault_of_its_episode_alone() -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        bad = len(body["messages"]) > 4 and any("Say 3." in message["content"] for message in body["messages"])
        handler.reply(b"<html>" if bad else chat_answer("up"))

    with serve(answer) as server:
        policy = policy_at(server, template="tests.policies.test_openai_compatible:with_task")
        specs = [EpisodeSpec(task_id=f"count/{i:04}") for i in range(8)]
        backend = make_backend("threads", 4)
        try:
            episodes = {e.task_id: e for e in rollout(specs, "test/Count-v0", policy, backend=backend)}
        finally:
            backend.close()
    assert len(episodes) == 8
    broken = episodes.pop("count/0003")
    assert (broken.outcome, broken.cause, broken.total_reward) == ("fault", "infrastructure", None)
    assert "not JSON" in broken.message
    assert {e.outcome for e in episodes.values()} == {"success"}
    assert episodes["count/0000"].usage["agent"] == {"calls": 3.0, "prompt_tokens": 3000.0, "completion_tokens": 60.0}


def with_task(view: Any, config: Any) -> list[dict[str, str]]:
    """Puts the task into the prompt, so that the server can tell the episodes apart."""
    from agentgym.prompts import chat

    messages = chat(view, config)
    return [{"role": "user", "content": view.instruction}, *messages]


def test_logged_messages_put_together_are_the_prompts_sent() -> None:
    with serve(says("up")) as server:
        [episode] = rollout([EpisodeSpec(task_id="count/0000")], "test/Count-v0", policy_at(server))
    whole: list[dict[str, Any]] = []
    assert [turn.kept_messages for turn in episode.turns] == [0, 2, 4]
    for turn, body in zip(episode.turns, server.bodies, strict=True):
        assert turn.messages is not None
        whole = whole[: turn.kept_messages] + turn.messages
        assert whole == body["messages"]


# Tool calls.

TOOLS = (ToolSpec(name="say", parameters={"type": "object", "properties": {"text": {"type": "string"}}}),)


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_context(action_format: str) -> Context:
    context = make_request().context
    context.tools, context.action_format = TOOLS, get_format(action_format)
    return context


@pytest.mark.parametrize("action_format", ["tool-call-json", "tool-call-hermes"])
def test_native_calls_are_offered_and_written_in_the_environments_format(action_format: str) -> None:
    request = make_request()
    request.context = tool_context(action_format)
    with serve(gives(chat_answer("Hm.", tool_calls=[call("say", '{"text": "<b>hi</b>"}')]))) as server:
        reply = ask(policy_at(server), request)
        [body] = server.bodies
    parsed = request.context.action_format.parse(reply.text, TOOLS)
    assert (parsed.tool, parsed.arguments, parsed.thought) == ("say", {"text": "<b>hi</b>"}, "Hm.")
    assert body["tools"][0]["function"]["name"] == "say"
    assert "Call exactly one" not in json.dumps(body["messages"])
    follow_up = [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "said"}]
    assistant, answer = native_messages(follow_up, request.context)
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {"text": "<b>hi</b>"}
    assert answer == {"role": "tool", "tool_call_id": assistant["tool_calls"][0]["id"], "content": "said"}


@pytest.mark.parametrize("action_format", ["tool-call-json", "tool-call-hermes"])
@pytest.mark.parametrize(
    ("calls", "error"),
    [
        ([call("say", "{not json")], "not JSON"),
        ([call("say", "[1]")], "must be an object"),
        ([call("say", {"text": "a"}), call("say", {"text": "b"})], "exactly one call"),
        ([call("shout", "{}")], "there is no tool"),
    ],
)
def test_calls_the_model_got_wrong_are_left_to_the_environment(
    action_format: str, calls: list[dict[str, Any]], error: str
) -> None:
    context = tool_context(action_format)
    text = read_text({"message": {"content": None, "tool_calls": calls}}, context.action_format)
    parsed = context.action_format.parse(text, TOOLS)
    assert parsed.action is None
    assert error in (parsed.error or "")


def test_tools_can_be_asked_for_as_text() -> None:
    request = make_request()
    request.context = tool_context("tool-call-json")
    with serve(says('{"name": "say", "arguments": {}}')) as server:
        assert ask(policy_at(server, native_tools=False), request).text.startswith("{")
        [body] = server.bodies
    assert "tools" not in body
    assert "Call exactly one" in body["messages"][0]["content"]


def test_a_model_that_thought_up_to_its_limit_or_refused_gives_text() -> None:
    assert read_text({"message": {"content": None}, "finish_reason": "length"}, None) == ""
    assert read_text({"message": {"content": None, "refusal": "I will not."}}, None) == "I will not."
