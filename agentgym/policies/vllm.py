"""A vLLM server, by tokens: prompts go as ids, and ids and log-probabilities come back as sampled.

Speaks vLLM's extension of /v1/completions (`return_token_ids`, from version 0.10.2). For training; for evaluation
alone `openai_compatible` needs no tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from agentgym.errors import InfrastructureError, UsageError
from agentgym.policies._chat import Chat, read_options, turn_seed
from agentgym.policies._http import ContextOverflow, Nonsense, Server, ServerOptions, first_choice, read_usage
from agentgym.policies._tokens import ChatTokens, Prompt, Texts, TokenRecorder, load_tokenizer, stop_texts
from agentgym.policies.base import Decision, Policy, Reply, Request, option_path

Count = Annotated[int, msgspec.Meta(ge=1)]


class VLLMOptions(ServerOptions, frozen=True, kw_only=True):
    """Options of this policy beside those of every server.

    Attributes:
        tokenizer: folder or hub id of the tokenizer; None for the model's name.
        max_context: tokens of prompt and answer together (the server's --max-model-len): answers are cut to fit.
        top_k: sample from this many tokens only.
        stop: texts that end an answer; they stay in it.
        logprobs_mode: what the server was started with. vLLM's default gives log-probabilities at temperature 1,
            whatever the sampling; "processed_logprobs" those of the distribution that was sampled.
        chat_template: path of a Jinja file instead of the tokenizer's own template.
        template_options: further variables of the chat template, such as {enable_thinking = false}.
    """

    tokenizer: str | None = None
    max_context: Count | None = None
    top_k: Count | None = None
    stop: Texts = ()
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    chat_template: str | None = None
    template_options: dict[str, Any] = msgspec.field(default_factory=dict)

    def behaviour(self) -> dict[str, Any]:
        """The options that change answers, and what the log-probabilities are of."""
        said = {**super().behaviour(), "temperature": self.sampling_temperature}
        for name in ("tokenizer", "chat_template"):
            if name in said:
                said[name] = option_path(said[name])
        processed = self.logprobs_mode == "processed_logprobs"
        return {**said, "logprob_temperature": (self.sampling_temperature or 1.0) if processed else 1.0}

    @property
    def sampling_temperature(self) -> float:
        """The temperature that is sent."""
        return 1.0 if self.temperature is None else self.temperature


class VLLMPolicy(Policy):
    """Asks /completions with token ids, many at a time; the token sequence of an episode grows as with `hf`.

    Args:
        model: name of the model at the server.
        tokenizer: a transformers tokenizer.
        options: see `VLLMOptions`.

    Attributes:
        version: number of updates the served model has seen; recorded with each reply. A trainer sets it.
    """

    name = "vllm"

    def __init__(self, model: str, tokenizer: Any, options: VLLMOptions) -> None:
        self.version = 0
        self._model = model
        self._options = options
        tokens = ChatTokens(tokenizer, chat_template=options.chat_template, template_options=options.template_options)
        self._recorder = TokenRecorder(Chat(options.config()), tokens)
        self._sampling = {
            "model": model,
            # What is left out would come from the model's own generation settings at the server.
            "temperature": options.sampling_temperature,
            "top_p": 1.0 if options.top_p is None else options.top_p,
            "top_k": options.top_k or 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "stop": list(stop_texts(options.stop)),
            "stop_token_ids": sorted(tokens.end_ids),
        }
        self._server = Server(options)

    def submit(self, requests: Sequence[Request]) -> Sequence[Decision]:
        """Sends all requests; each future ends with a reply or its own error."""
        return [self._send(request) for request in requests]

    def _send(self, request: Request) -> Decision:
        try:
            prompt = self._recorder.prepare(request)
        except Exception as error:
            return error
        limit = self._options.max_tokens
        if self._options.max_context is not None:
            limit = min(limit, self._options.max_context - len(prompt.ids))
            if limit < 1:
                return self._recorder.overflow(prompt, self.version)
        body = {**self._sampling, "prompt": prompt.ids, "max_tokens": limit, "seed": turn_seed(request)}
        return self._server.start(self._ask(body, prompt, self.version), request.context.episode_id)

    async def _ask(self, body: dict[str, Any], prompt: Prompt, version: int) -> Reply:
        def check(answer: Any) -> tuple[list[int], list[float], dict[str, Any]]:
            return *self._read(first_choice(answer), prompt), answer

        try:
            (ids, logprobs, answer), tries = await self._server.post("/completions", body, check)
        except ContextOverflow:
            return self._recorder.overflow(prompt, version)
        usage = read_usage(answer, self._options, tries)
        return self._recorder.reply(prompt, ids, logprobs, usage=usage, policy_version=version)

    def _read(self, choice: dict[str, Any], prompt: Prompt) -> tuple[list[int], list[float]]:
        """Ids and log-probabilities of an answer.

        Raises:
            Nonsense: if they are missing, of wrong types, or not of one length.
            UsageError: if the server has never given ids.
            InfrastructureError: if it answered another prompt.
        """
        ids, given = choice.get("token_ids"), choice.get("logprobs")
        if ids is None and not self._server.answered:
            raise UsageError("the server gives no token_ids: this policy needs vLLM 0.10.2 or newer")
        if not _is_ids(ids) or not ids:
            raise Nonsense("it has no token_ids")
        logprobs = given.get("token_logprobs") if isinstance(given, dict) else None
        if not isinstance(logprobs, list) or len(logprobs) != len(ids) or not all(map(_is_logprob, logprobs)):
            raise Nonsense("it has not one log-probability a token")
        seen = choice.get("prompt_token_ids")
        if seen is not None and seen != prompt.ids:
            raise InfrastructureError("the model server answered another prompt than the one sent (did it cut it?)")
        return ids, [float(logprob) for logprob in logprobs]

    def finish(self, episode_id: str) -> None:
        """Forgets the episode and cancels what it still waits for."""
        self._server.cancel(episode_id)
        self._recorder.finish(episode_id)

    def describe(self) -> dict[str, Any]:
        """Model and every option that changes answers."""
        return {"name": self.name, "model": option_path(self._model), **self._options.behaviour()}

    def close(self) -> None:
        """Cancels what is under way."""
        self._server.close()


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**31 for item in value)


def _is_logprob(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value <= 1e-3


def make(argument: str | None = None, **options: Any) -> Policy:
    """Makes the policy.

    Args:
        argument: name of the model at the server, as in "vllm:Qwen/Qwen3-4B".
        **options: of `VLLMOptions`, `ServerOptions` and `PromptOptions`.

    Raises:
        UsageError: without a model, an address or a tokenizer, or for an unknown option.
    """
    if not argument:
        raise UsageError("name the server's model: vllm:MODEL")
    read = read_options(VLLMOptions, "vllm", options)
    return VLLMPolicy(argument, load_tokenizer(read.tokenizer or argument), read)
