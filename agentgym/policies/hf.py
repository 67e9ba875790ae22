"""A transformers causal language model in this process, on CPU or GPU; records the tokens as sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from agentgym.errors import DataError, InfrastructureError, UsageError, require_extra
from agentgym.policies._chat import Chat, PromptOptions, read_options, turn_seed
from agentgym.policies._generate import Completion, Row, generate
from agentgym.policies._kept import CachedSampler, keeps_cache
from agentgym.policies._tokens import ChatTokens, Prompt, Texts, TokenRecorder, load_tokenizer, stop_texts
from agentgym.policies.base import Decision, Policy, Request, option_path

Count = Annotated[int, msgspec.Meta(ge=1)]


class HFOptions(PromptOptions, frozen=True, kw_only=True):
    """Options of this policy beside those of prompts.

    Attributes:
        device: "auto" (a GPU if there is one), "cpu", "cuda:1" ...
        dtype: of the weights; "auto" for what the files hold.
        max_new_tokens: longest answer, in tokens.
        max_context: tokens of prompt and answer together; None for what the model's configuration says. A prompt
            that leaves no room is answered with an empty text, counted as usage["context_overflow"].
        temperature: 0 takes the likeliest token.
        top_p, top_k: restrict sampling; None for no restriction.
        stop: texts that end an answer; they stay in it.
        batch_size: rows in one forward.
        chat_template: path of a Jinja file instead of the tokenizer's own template.
        template_options: further variables of the chat template, such as {enable_thinking = false}.
    """

    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_new_tokens: Count = 512
    max_context: Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Count | None = None
    stop: Texts = ()
    batch_size: Count = 32
    chat_template: str | None = None
    template_options: dict[str, Any] = msgspec.field(default_factory=dict)

    def behaviour(self) -> dict[str, Any]:
        """The options that change answers, and what the log-probabilities are of."""
        said = self.describe("device", "batch_size", "chat_template")
        if self.chat_template is not None:
            said["chat_template"] = option_path(self.chat_template)
        return {**said, "logprob_temperature": self.temperature or 1.0}


class HFPolicy(Policy):
    """Samples from a model, all waiting episodes together.

    With the prompt template "chat" and no window, the tokens of an episode only ever grow. Log-probabilities are the
    model's at the sampling temperature, before top_k and top_p. Where the model allows it, the cache of each episode is
    kept over its turns and only new tokens are read. A row's draws come from its own episode's seed, so
    the batch it is in changes an answer only where rounding of the logits does.

    Args:
        model: a causal language model of transformers; its device is used.
        tokenizer: its tokenizer, with a chat template.
        options: see `HFOptions`.
        label: the model's name in descriptions.
    """

    name = "hf"
    gather = True

    def __init__(self, model: Any, tokenizer: Any, options: HFOptions | None = None, *, label: str = "") -> None:
        options = HFOptions() if options is None else options
        self._version = 0
        self._model = model
        self._kept = CachedSampler(model, options.batch_size) if keeps_cache(model) else None
        self._options = options
        self._label = label
        tokens = ChatTokens(
            tokenizer,
            chat_template=options.chat_template,
            template_options=options.template_options,
            end_ids=_end_ids(model),
        )
        self._recorder = TokenRecorder(Chat(options.config()), tokens)
        self._stopped = _stop_check(tokens, stop_texts(options.stop))
        own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._context: int | None = options.max_context or own

    def submit(self, requests: Sequence[Request]) -> Sequence[Decision]:
        """Samples for all requests; an error concerns the episodes of its own batch only."""
        decisions: dict[int, Decision] = {}
        ready: list[tuple[int, Prompt, Row]] = []
        for index, request in enumerate(requests):
            try:
                prompt = self._recorder.prepare(request)
            except Exception as error:
                decisions[index] = error
                continue
            limit = self._options.max_new_tokens
            if self._context is not None:
                limit = min(limit, self._context - len(prompt.ids))
            if limit < 1:
                decisions[index] = self._recorder.overflow(prompt, self._version)
                if self._kept is not None:
                    self._kept.forget((request.context.episode_id, request.role))
            else:
                # The first numbers of a generator do not depend on how many are drawn.
                ready.append((index, prompt, Row(prompt.ids, np.random.default_rng(turn_seed(request)).random(limit))))
        answers = self._answer([(requests[index], prompt, row) for index, prompt, row in ready])
        decisions.update(zip((index for index, _, _ in ready), answers, strict=True))
        return [decisions[index] for index in range(len(requests))]

    def _answer(self, asked: list[tuple[Request, Prompt, Row]]) -> list[Decision]:
        options = self._options
        sampling: dict[str, Any] = {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "end_ids": self._recorder.tokens.end_ids,
            "stopped": self._stopped,
        }
        rows = [row for _, _, row in asked]
        if self._kept is not None:
            keys = [(request.context.episode_id, request.role) for request, _, _ in asked]
            sampled = self._kept.generate(keys, rows, **sampling)
        else:
            sampled = self._in_batches(rows, sampling)
        return [
            _memory_advice(answer, len(rows))
            if isinstance(answer, Exception)
            else self._recorder.reply(prompt, answer.ids, answer.logprobs, policy_version=self._version)
            for (_, prompt, _), answer in zip(asked, sampled, strict=True)
        ]

    def _in_batches(self, rows: list[Row], sampling: dict[str, Any]) -> list[Completion | Exception]:
        """Encodes whole prompts again, for models whose cache cannot be kept; an error concerns its batch only."""
        sampled: list[Completion | Exception] = [RuntimeError()] * len(rows)
        order = sorted(range(len(rows)), key=lambda place: len(rows[place].ids))  # little padding
        for start in range(0, len(order), self._options.batch_size):
            batch = order[start : start + self._options.batch_size]
            answers: Sequence[Completion | Exception]
            try:
                answers = generate(self._model, [rows[place] for place in batch], **sampling)
            except Exception as error:
                answers = [error] * len(batch)
            for place, answer in zip(batch, answers, strict=True):
                sampled[place] = answer
        return sampled

    @property
    def version(self) -> int:
        """Number of updates the model has seen; setting it says that the weights have changed."""
        return self._version

    @version.setter
    def version(self, value: int) -> None:
        self._version = value
        if self._kept is not None:
            self._kept.clear()

    def finish(self, episode_id: str) -> None:
        """Forgets the episode."""
        if self._kept is not None:
            for role in self._recorder.roles(episode_id):
                self._kept.forget((episode_id, role))
        self._recorder.finish(episode_id)

    def describe(self) -> dict[str, Any]:
        """Model and every option that changes answers."""
        return {"name": self.name, "model": self._label, **self._options.behaviour()}

    def close(self) -> None:
        """Lets go of the model."""
        self._model = self._kept = None


def _memory_advice(error: Exception, rows: int) -> Exception:
    torch = require_extra("torch", extra="hf")
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return InfrastructureError(f"no memory for {rows} rows ({error}); lower batch_size or max_new_tokens")
    return error


def _stop_check(tokens: ChatTokens, stop: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
    """Whether a completion contains one of these texts, asked after each of its tokens."""
    if not stop:
        return None
    # A token holds at least one byte, so a text that has just been completed lies within this many tokens.
    reach = max(len(text.encode()) for text in stop) + 1

    def stopped(ids: Sequence[int]) -> bool:
        tail = tokens.text(ids[-reach:])
        return any(text in tail for text in stop)

    return stopped


def _end_ids(model: Any) -> list[int]:
    """The ids that the model's own generation settings end an answer with."""
    settings = getattr(model, "generation_config", None)
    ends = getattr(settings, "eos_token_id", None)
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def load_model(name: str, *, device: str = "auto", dtype: str = "auto") -> Any:
    """A causal language model by folder or hub id, on its device.

    Raises:
        UsageError: if there is none, or the device cannot be used.
    """
    torch = require_extra("torch", extra="hf")
    transformers = require_extra("transformers", extra="hf")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"no causal language model at {option_path(name)!r}: {error}. Give a model's folder or hub id"
        ) from error
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        return model.to(where)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device={device!r} cannot be used ({error}); give cpu, cuda or cuda:NUMBER") from error


SETTINGS = "agentgym.json"  # in a trained model's folder: the prompt and sampling it was trained with


def _own_settings(folder: str) -> dict[str, Any]:
    """Options that a trainer left beside a model.

    Raises:
        DataError: if they cannot be read.
    """
    path = Path(folder) / SETTINGS
    if not path.is_file():
        return {}
    try:
        settings: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(path, f"cannot be read ({error})", "Delete it, and give these options yourself") from error
    return settings


def make(argument: str | None = None, **options: Any) -> Policy:
    """Loads the model and makes the policy.

    Args:
        argument: folder or hub id of the model, as in "hf:/models/smollm2". The settings of a model that was trained
            here are those of its training, unless options say otherwise.
        **options: of `HFOptions` and `PromptOptions`.

    Raises:
        UsageError: without a model, or for an unknown option.
    """
    if not argument:
        raise UsageError("name the model: hf:PATH or hf:HUB_ID")
    read = read_options(HFOptions, "hf", {**_own_settings(argument), **options})
    tokenizer = load_tokenizer(argument)
    model = load_model(argument, device=read.device, dtype=read.dtype)
    return HFPolicy(model, tokenizer, read, label=option_path(argument))
