"""From messages to ids: an episode's ids only ever grow, whatever the chat template does to earlier turns."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentgym.episode import Turn
from agentgym.errors import DataError, UsageError
from agentgym.policies._chat import Chat
from agentgym.policies._tokens import ChatTokens, TokenRecorder, stop_texts
from agentgym.prompts import PromptConfig
from tests.policies.fake_server import make_request
from tests.policies.tiny_model import TEMPLATES, make_tokenizer
from tests.shared_data import need

need("torch")

TEXTS = [
    "up",
    " up \n",
    "<think>no <action></think>\n<action>up</action>",
    "ANSWER",
    "",
    "naïve 😀",
    "<|im_end|>\n<|eos|> it said",
    "a\n\n b",
]
END = {"chatml": "<|im_end|>", "llama": "<|eot|>", "forgetful": "<|eos|>"}


def as_text(tokens: ChatTokens, ids: list[int]) -> str:
    return str(tokens.tokenizer.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_template_says_what_ends_an_answer(template: str) -> None:
    tokens = ChatTokens(make_tokenizer(template))
    ends = tokens.tokenizer.convert_ids_to_tokens(sorted(tokens.end_ids))
    assert set(ends) == {"<|eos|>", END[template]}


@pytest.mark.parametrize("template", ["chatml", "llama"])
@pytest.mark.parametrize("text", [text for text in TEXTS if text == text.strip()])
def test_a_template_that_leaves_earlier_turns_alone_gives_the_same_ids_either_way(template: str, text: str) -> None:
    tokens = ChatTokens(make_tokenizer(template))
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "count is 0"}]
    new = [{"role": "user", "content": f"count is 1 {text}".strip()}]
    prompt = tokens.whole(first)
    for ended in (True, False):
        answer = tokens.tokenizer(text + END[template] * ended, add_special_tokens=False)["input_ids"]
        if not answer:
            continue
        following = tokens.following(answer[-1], new)
        assert following is not None
        if ended or answer[-1] not in tokens.end_ids:
            answered = [*first, {"role": "assistant", "content": text}, *new]
            assert prompt + answer + following == tokens.whole(answered)


def test_what_was_sampled_stays_where_the_template_would_change_it() -> None:
    tokens = ChatTokens(make_tokenizer("forgetful"))
    answer = tokens.tokenizer(" Hm.</think> up <|eos|>", add_special_tokens=False)["input_ids"]
    following = tokens.following(answer[-1], [{"role": "user", "content": " next "}])
    assert following is not None
    assert as_text(tokens, following) == "\nUSER: next\nA: <think>\n"
    cut_short = tokens.following(answer[0], [{"role": "user", "content": "next"}])
    assert cut_short is not None
    assert as_text(tokens, cut_short) == " <|eos|>\nUSER: next\nA: <think>\n"


def test_an_end_that_the_template_does_not_write_is_kept_and_the_turn_closed() -> None:
    tokens = ChatTokens(make_tokenizer("chatml"))
    following = tokens.following(tokens.tokenizer.eos_token_id, [{"role": "user", "content": "x"}])
    assert following is not None
    assert as_text(tokens, following) == "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_does_not_show_answers_is_encoded_afresh() -> None:
    hides = "{% for m in messages %}{% if m['role'] == 'user' %}U: {{ m['content'] }}\n{% endif %}{% endfor %}"
    tokens = ChatTokens(make_tokenizer(hides))
    assert tokens.following(5, [{"role": "user", "content": "x"}]) is None
    doubles = "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}"
    assert ChatTokens(make_tokenizer(doubles)).following(5, [{"role": "user", "content": "x"}]) is None


def test_templates_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="chat_template=PATH"):
        ChatTokens(make_tokenizer(""))
    path = tmp_path / "template.jinja"
    with pytest.raises(DataError, match="cannot be read"):
        ChatTokens(make_tokenizer(""), chat_template=str(path))
    path.write_text("{% for m in messages %}[{{ m['role'] }}{{ mood }}]{{ m['content'] }}{% endfor %}")
    tokens = ChatTokens(make_tokenizer(""), chat_template=str(path), template_options={"mood": "!"})
    assert as_text(tokens, tokens.whole([{"role": "user", "content": "x"}])) == "[user!]x"
    no_system = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    refusing = ChatTokens(make_tokenizer(no_system + TEMPLATES["chatml"]))
    with pytest.raises(UsageError, match=r"no system role.*system="):
        refusing.whole([{"role": "system", "content": "s"}, {"role": "user", "content": "x"}])
    with pytest.raises(UsageError, match="empty text"):
        stop_texts(("</action>", ""))


def play(recorder: TokenRecorder, random_: random.Random, turns: int, **options: Any) -> list[Any]:
    """An episode with random answers; yields (whole prompt, completion, reply) of each turn."""
    tokens = recorder.tokens
    request = make_request(**options)
    played = []
    for _ in range(turns):
        prompt = recorder.prepare(request)
        completion = [random_.randrange(8, 300) for _ in range(random_.randrange(1, 6))]
        if random_.random() < 0.5:
            completion.append(random_.choice(sorted(tokens.end_ids)))
        reply = recorder.reply(prompt, completion, [-1.0] * len(completion))
        played.append((prompt.ids, completion, reply))
        seen = request.info["admissible"]
        turn = Turn(observation=request.observation, completion=reply.text, admissible=seen)
        request.history, request.observation = [*request.history, turn], random_.choice(TEXTS)
    return played


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("seed", range(5))
def test_logged_ids_put_together_are_the_prompts(template: str, seed: int) -> None:
    recorder = TokenRecorder(Chat(PromptConfig()), ChatTokens(make_tokenizer(template)))
    whole: list[int] = []
    for number, (prompt, completion, reply) in enumerate(play(recorder, random.Random(seed), 6)):
        assert reply.kept_ids == len(whole)
        assert (reply.prompt_ids.dtype, reply.completion_ids.dtype) == (np.int32, np.int32)
        whole = whole[: reply.kept_ids] + reply.prompt_ids.tolist()
        assert whole == prompt
        whole += reply.completion_ids.tolist()
        assert reply.completion_ids.tolist() == completion
        assert as_text(recorder.tokens, whole).count("Reply with the action only.") == 1, number
        assert reply.usage == {"prompt_tokens": len(prompt), "completion_tokens": len(completion), "calls": 1}


def test_windows_are_encoded_afresh() -> None:
    recorder = TokenRecorder(Chat(PromptConfig(window=1)), ChatTokens(make_tokenizer()))
    replies = [reply for _, _, reply in play(recorder, random.Random(0), 4)]
    # The first two prompts show everything; from then on the oldest exchange is missing.
    assert [reply.kept_ids > 0 for reply in replies] == [False, True, False, False]


def test_an_answer_that_comes_too_late_does_not_touch_the_next_attempt() -> None:
    recorder = TokenRecorder(Chat(PromptConfig()), ChatTokens(make_tokenizer()))
    late = recorder.prepare(make_request())
    recorder.finish("count/0000#0#0")
    again = recorder.prepare(make_request())
    recorder.reply(late, [10, 11], [-1.0, -1.0])
    assert again.memory.ids == []
    assert recorder.reply(again, [12], [-1.0]).kept_ids == 0


def test_two_roles_of_an_episode_are_kept_apart() -> None:
    recorder = TokenRecorder(Chat(PromptConfig()), ChatTokens(make_tokenizer()))
    for role in ("buyer", "seller"):
        request = make_request()
        request.role = role
        reply = recorder.reply(recorder.prepare(request), [20], [-1.0])
        assert (reply.kept_ids, reply.kept_messages) == (0, 0)
