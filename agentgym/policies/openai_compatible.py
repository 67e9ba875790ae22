"""Any server that speaks OpenAI's chat completions: vLLM, SGLang, llama.cpp, ollama, or a hosted model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from agentgym.actions import ActionFormat, ToolSpec, canonical_call
from agentgym.errors import UsageError
from agentgym.policies._chat import Chat, Message, read_options, turn_seed
from agentgym.policies._http import ContextOverflow, Nonsense, Server, ServerOptions, first_choice, read_usage
from agentgym.policies.base import Context, Decision, Policy, Reply, Request


class ChatOptions(ServerOptions, frozen=True, kw_only=True):
    """Options of this policy beside those of every server.

    Attributes:
        native_tools: where the environment has tools and a tool-call action format, offer the tools in the request
            and read `tool_calls`; otherwise calls are asked for and read as text.
        send_seed: send a seed with each request; some servers refuse it.
        max_tokens_field: name of the limit in the request; newer OpenAI models want "max_completion_tokens".
    """

    native_tools: bool = True
    send_seed: bool = True
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"


class OpenAICompatiblePolicy(Policy):
    """Asks /chat/completions for each decision, many at a time.

    A prompt that has outgrown the model's context gives an empty answer, counted as usage["context_overflow"].

    Args:
        model: name of the model at the server.
        options: see `ChatOptions`.
    """

    name = "openai_compatible"

    def __init__(self, model: str, options: ChatOptions) -> None:
        self._model = model
        self._options = options
        self._server = Server(options)
        self._chat = Chat(options.config())
        self._native = Chat(msgspec.structs.replace(options.config(), instructions=False))

    def submit(self, requests: Sequence[Request]) -> Sequence[Decision]:
        """Sends all requests; each future ends with a reply or its own error."""
        return [self._send(request) for request in requests]

    def _send(self, request: Request) -> Decision:
        native = self._options.native_tools and is_native(request.context)
        chat = self._native if native else self._chat
        messages = chat.messages(request)
        if native:
            messages = native_messages(messages, request.context)
        delta, kept = chat.delta(request, messages)
        body = self._body(request, messages, native)
        return self._server.start(self._ask(body, request.context, native, delta, kept), request.context.episode_id)

    def _body(self, request: Request, messages: list[Message], native: bool) -> dict[str, Any]:
        options = self._options
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            options.max_tokens_field: options.max_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "seed": turn_seed(request) if options.send_seed else None,
        }
        if native:
            body["tools"] = [tool_schema(tool) for tool in request.context.tools]
            body["parallel_tool_calls"] = False
        return {name: value for name, value in body.items() if value is not None}

    async def _ask(
        self, body: dict[str, Any], context: Context, native: bool, delta: list[Message], kept: int
    ) -> Reply:
        def check(answer: Any) -> tuple[str, dict[str, Any]]:
            choice = first_choice(answer)
            return read_text(choice, context.action_format if native else None), answer

        try:
            (text, answer), tries = await self._server.post("/chat/completions", body, check)
        except ContextOverflow:  # the model's failing, not to be left out of its success rate
            return Reply(text="", messages=delta, kept_messages=kept, usage={"calls": 1.0, "context_overflow": 1.0})
        usage = read_usage(answer, self._options, tries)
        return Reply(text=text, messages=delta, kept_messages=kept, usage=usage)

    def finish(self, episode_id: str) -> None:
        """Forgets the episode and cancels what it still waits for."""
        self._server.cancel(episode_id)
        self._chat.finish(episode_id)
        self._native.finish(episode_id)

    def describe(self) -> dict[str, Any]:
        """Model and every option that changes answers."""
        return {"name": self.name, "model": self._model, **self._options.behaviour()}

    def close(self) -> None:
        """Cancels what is under way."""
        self._server.close()


def is_native(context: Context) -> bool:
    """Whether the environment's actions are tool calls."""
    return bool(context.tools) and context.action_format.name in ("tool-call-json", "tool-call-hermes")


def tool_schema(tool: ToolSpec) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def native_messages(messages: list[Message], context: Context) -> list[Message]:
    """Past calls and their answers in OpenAI's form: `tool_calls`, then a message of role "tool".

    An answer that was no call stays the text it was.
    """
    converted: list[Message] = []
    open_call: str | None = None
    for message in messages:
        parsed = None
        if message["role"] == "assistant":
            parsed = context.action_format.parse(message["content"], context.tools)
        if parsed is not None and parsed.tool is not None:
            open_call = f"call_{len(converted)}"
            function = {
                "name": parsed.tool,
                "arguments": msgspec.json.encode(parsed.arguments, order="deterministic").decode(),
            }
            call = {"id": open_call, "type": "function", "function": function}
            converted.append({"role": "assistant", "content": parsed.thought, "tool_calls": [call]})
            continue
        if message["role"] == "user" and open_call is not None:
            message = {"role": "tool", "tool_call_id": open_call, "content": message["content"]}
        open_call = None
        converted.append(message)
    return converted


def read_text(choice: dict[str, Any], action_format: ActionFormat | None) -> str:
    """The answer of a choice as the environment's `step` takes it.

    Args:
        choice: of a chat completion.
        action_format: the tool-call format to write calls in, or None to take the content alone.

    Raises:
        Nonsense: if there is neither text nor a call where the protocol wants it.
    """
    message = choice.get("message")
    if not isinstance(message, dict):
        raise Nonsense("its choice has no message")
    content, calls = message.get("content"), message.get("tool_calls")
    if action_format is not None and calls:
        return _write_calls(calls, content if isinstance(content, str) else "", action_format)
    if isinstance(content, str):
        return content
    if content is not None:
        raise Nonsense("its content is not text")
    if isinstance(message.get("refusal"), str):
        return str(message["refusal"])
    if choice.get("finish_reason") == "length":
        return ""  # a reasoning model that thought up to the limit: its failing, not the server's
    raise Nonsense("its content is null")


def _write_calls(calls: Any, content: str, action_format: ActionFormat) -> str:
    """Calls as text. What the environment must refuse (two calls, arguments that are no JSON) is written so too."""
    if not isinstance(calls, list):
        raise Nonsense("its tool_calls are not a list")
    written: list[str] = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Nonsense("its tool call names no function")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments)
            except (msgspec.DecodeError, RecursionError):
                return _bare({"name": function["name"], "arguments": arguments}, action_format)
        if not isinstance(arguments, dict):
            return _bare({"name": function["name"], "arguments": arguments}, action_format)
        written.append(canonical_call(function["name"], arguments))
    if len(written) != 1:
        return _bare([msgspec.json.decode(call) for call in written], action_format)
    for thought in (content.strip() or None, None):
        try:
            return action_format.render(written[0], thought)
        except UsageError:  # the content holds the format's own tags; the call counts
            continue
    return _bare(msgspec.json.decode(written[0]), action_format)


def _bare(value: Any, action_format: ActionFormat) -> str:
    text = msgspec.json.encode(value).decode().replace("<", "\\u003c")
    return f"<tool_call>{text}</tool_call>" if action_format.name == "tool-call-hermes" else text


def make(argument: str | None = None, **options: Any) -> Policy:
    """Makes the policy.

    Args:
        argument: name of the model, as in "openai_compatible:Qwen/Qwen3-4B".
        **options: of `ChatOptions`, `ServerOptions` and `PromptOptions`.

    Raises:
        UsageError: without a model or an address, or for an unknown option.
    """
    if not argument:
        raise UsageError("name the server's model: openai_compatible:MODEL")
    return OpenAICompatiblePolicy(argument, read_options(ChatOptions, "openai_compatible", options))
