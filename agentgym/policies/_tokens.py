"""Token bookkeeping of every policy that knows its model's tokens: what was sampled is never encoded again.

The prompt of a turn is the prompt of the turn before, the completion exactly as sampled, and the ids of what the chat
template puts behind an answer. The latter come from a short conversation of fixed text, so a template that changes
earlier turns (drops thoughts, trims, adds a default system message) cannot change what the model has already seen.
Where a prompt does not extend the one before (windows), it is encoded afresh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from numpy.typing import ArrayLike

from agentgym.errors import DataError, UsageError, require_extra
from agentgym.policies._chat import Chat, Message
from agentgym.policies.base import Reply, Request, option_path

Texts = str | tuple[str, ...]  # one text, or several
REMEMBERED = 4096  # messages whose ids are kept


def load_tokenizer(name: str) -> Any:
    """A transformers tokenizer by folder or hub id.

    Raises:
        UsageError: if there is none.
    """
    transformers = require_extra("transformers", extra="hf")
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"no tokenizer at {option_path(name)!r}: {error}. Give a model's folder or hub id") from error


def stop_texts(given: Texts) -> tuple[str, ...]:
    """The texts that end an answer.

    Raises:
        UsageError: if one is empty, which would end every answer at once.
    """
    texts = (given,) if isinstance(given, str) else tuple(given)
    if "" in texts:
        raise UsageError("stop has an empty text, which would end every answer at once; leave it out")
    return texts


class ChatTokens:
    """A tokenizer with its chat template.

    Args:
        tokenizer: a transformers tokenizer.
        chat_template: path of a Jinja file to use in place of the tokenizer's own template.
        template_options: further variables of the template, such as enable_thinking.
        end_ids: ids that end an answer, beside the tokenizer's own and the one that the template closes a turn with.

    Raises:
        UsageError: if there is no chat template, or it cannot render a conversation.
        DataError: if the template's file cannot be read.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        end_ids: Iterable[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self._template = _read_template(chat_template)
        self._options = dict(template_options or {})
        self._special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        self._between: dict[str, str] = {}
        self._known: dict[tuple[Any, ...], list[int] | None] = {}
        own = (tokenizer.eos_token_id, self._turn_end())
        self.end_ids = frozenset(int(token) for token in (*end_ids, *own) if token is not None)

    def whole(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a whole prompt, up to where the answer begins."""
        return self._remember(None, messages, lambda: self._encode(self._render(messages, generation=True))) or []

    def _remember(
        self, last_id: int | None, messages: Sequence[Message], make: Callable[[], list[int] | None]
    ) -> list[int] | None:
        """What was made for these messages before: games repeat themselves, and templates take their time."""
        key = (last_id, *((message["role"], str(message["content"])) for message in messages))
        if any(len(message) != 2 for message in messages):
            return make()
        if key not in self._known:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[key] = make()
        ids = self._known[key]
        return None if ids is None else list(ids)

    def following(self, last_id: int, messages: Sequence[Message]) -> list[int] | None:
        """Ids between an answer and the next one.

        Args:
            last_id: last id of the answer; the end of turn is not repeated where it is that already.
            messages: what follows the answer.

        Returns:
            The ids, or None if the template does not show answers as they are.
        """
        return self._remember(last_id, messages, lambda: self._following(last_id, messages))

    def _following(self, last_id: int, messages: Sequence[Message]) -> list[int] | None:
        mark = _mark(messages)
        tail = _after(self._render(_answered(mark, messages), generation=True), mark)
        if tail is None:
            return None
        # Behind a special token, text is encoded as it is within a whole prompt: no prefix space is added.
        anchor = self.tokenizer.eos_token_id
        if last_id in self.end_ids:
            anchor = last_id
            end = self.tokenizer.convert_ids_to_tokens(last_id)
            closing, found, _ = self._text_between(messages[0]["role"]).partition(end)
            if found and tail.startswith(closing + end):
                tail = tail[len(closing + end) :]
        if anchor is not None:
            ids = self._encode(self.tokenizer.convert_ids_to_tokens(anchor) + tail)
            if ids and ids[0] == anchor:
                return ids[1:]
        return self._encode(tail)

    def text(self, completion: Sequence[int]) -> str:
        """The text of a completion without its special tokens."""
        return str(self.tokenizer.decode(completion, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def answer(self, text: str) -> list[int]:
        """Ids of an answer with this text, as a model would have sampled them, end of turn included."""
        end = self._turn_end()
        if end is None:
            end = self.tokenizer.eos_token_id
        return [*self._encode(text), *([] if end is None else [end])]

    def _turn_end(self) -> int | None:
        """The special token that the template closes an answer with."""
        mark = _mark(())
        closing = _after(self._render(_answered(mark, ()), generation=False), mark)
        return next((token for token in self._encode(closing or "") if token in self._special), None)

    def _text_between(self, role: str) -> str:
        """What stands between an answer and the content of a message behind it."""
        if role not in self._between:
            first, second = _mark(()), _mark([{"content": _mark(())}])
            messages = _answered(first, [{"role": role, "content": second}])
            tail = _after(self._render(messages, generation=False).partition(second)[0], first)
            self._between[role] = tail or ""
        return self._between[role]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _render(self, messages: Sequence[Message], *, generation: bool) -> str:
        options = self._options if self._template is None else {**self._options, "chat_template": self._template}
        if self._template is None and not self.tokenizer.chat_template:
            raise UsageError("this tokenizer has no chat template: give a Jinja file with chat_template=PATH")
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=generation, **options
                )
            )
        except jinja2.TemplateError as error:
            raise UsageError(
                f"the chat template refuses the conversation ({error}). Where it takes no system message, "
                'give system="" and instructions=false, or another template with chat_template=PATH'
            ) from error


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(path, f"cannot be read ({error})", "Give chat_template the path of a Jinja file") from error


def _mark(messages: Sequence[Mapping[str, Any]]) -> str:
    """A text without blanks, that no message contains."""
    mark = "ANSWER"
    while any(mark in str(message.get("content")) for message in messages):
        mark += "Z"
    return mark


def _answered(answer: str, messages: Sequence[Message]) -> list[Message]:
    return [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": answer}, *messages]


def _after(text: str, mark: str) -> str | None:
    return text.partition(mark)[2] if text.count(mark) == 1 else None


class _Memory:
    """What is kept of one role's last turn; one that was let go of may still be written by a late answer."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.answer = ""
        self.ids: list[int] = []


class Prompt(NamedTuple):
    """A prompt to be answered.

    Attributes:
        ids: all of it.
        kept: how many of the first ids are the prompt and completion of the turn before.
        messages: all messages.
        new_messages, kept_messages: as in `Reply`.
        memory: where the answer is remembered.
    """

    ids: list[int]
    kept: int
    messages: list[Message]
    new_messages: list[Message]
    kept_messages: int
    memory: _Memory


class TokenRecorder:
    """Prompts as ids and answers as replies, for all episodes of a policy.

    Args:
        chat: renders requests.
        tokens: the tokenizer.
    """

    def __init__(self, chat: Chat, tokens: ChatTokens) -> None:
        self._chat = chat
        self.tokens = tokens
        self._memories: dict[tuple[str, str], _Memory] = {}

    def prepare(self, request: Request) -> Prompt:
        """The prompt of a request."""
        messages = self._chat.messages(request)
        delta, kept_messages = self._chat.delta(request, messages)
        memory = self._memories.setdefault((request.context.episode_id, request.role), _Memory())
        ids: list[int] | None = None
        seen = [*memory.messages, {"role": "assistant", "content": memory.answer}]
        new = messages[len(seen) :]
        if memory.ids and new and messages[: len(seen)] == seen:
            ids = self.tokens.following(memory.ids[-1], new)
        if ids is None:
            return Prompt(self.tokens.whole(messages), 0, messages, delta, kept_messages, memory)
        return Prompt([*memory.ids, *ids], len(memory.ids), messages, delta, kept_messages, memory)

    def reply(
        self,
        prompt: Prompt,
        completion: Sequence[int],
        logprobs: ArrayLike,
        *,
        usage: Mapping[str, float] | None = None,
        policy_version: int = 0,
    ) -> Reply:
        """The reply for a completion, which is remembered.

        Args:
            prompt: what was answered.
            completion: ids as sampled, with the end of turn if it was.
            logprobs: one an id.
            usage: of this turn; counts of tokens are added where they are missing.
            policy_version: see `Reply`.
        """
        text = self.tokens.text(completion)
        memory = prompt.memory
        memory.messages, memory.answer, memory.ids = prompt.messages, text, [*prompt.ids, *completion]
        counts = {"prompt_tokens": float(len(prompt.ids)), "completion_tokens": float(len(completion)), "calls": 1.0}
        return Reply(
            text=text,
            messages=prompt.new_messages,
            kept_messages=prompt.kept_messages,
            prompt_ids=np.array(prompt.ids[prompt.kept :], dtype=np.int32),
            kept_ids=prompt.kept,
            completion_ids=np.array(completion, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            usage={**counts, **(usage or {})},
            policy_version=policy_version,
        )

    def overflow(self, prompt: Prompt, policy_version: int = 0) -> Reply:
        """The reply where the prompt leaves no room for an answer: an empty one, which the environment refuses.

        That an episode outgrows its model is the model's failure, no fault to be left out of the success rate.
        """
        prompt.memory.ids = []
        return Reply(
            text="",
            messages=prompt.new_messages,
            kept_messages=prompt.kept_messages,
            usage={"context_overflow": 1.0},
            policy_version=policy_version,
        )

    def roles(self, episode_id: str) -> list[str]:
        """The roles of an episode that have been answered."""
        return [role for known, role in self._memories if known == episode_id]

    def finish(self, episode_id: str) -> None:
        """Forgets an episode."""
        self._chat.finish(episode_id)
        for key in [key for key in self._memories if key[0] == episode_id]:
            del self._memories[key]
