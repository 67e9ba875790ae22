"""Requests to a model server from a background event loop, with bounded concurrency and patient retries."""

from __future__ import annotations

import asyncio
import email.utils
import math
import os
import re
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec
import tenacity

from agentgym.errors import InfrastructureError, UsageError
from agentgym.policies._chat import PromptOptions

T = TypeVar("T")
Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
MAX_BODY = 64 * 2**20  # bytes; no answer of a model is longer
MAX_WAIT = 300.0  # seconds between two tries, whatever Retry-After asks for
_TRANSIENT = frozenset({408, 409, 425, 429})
# As OpenAI, vLLM, SGLang, llama.cpp and Anthropic say it.
_OVERFLOW = re.compile(
    rb"context[ _-]?(length|size|window)|exceed_context|max_model_len|maximum model length|(prompt|input) is too long",
    re.IGNORECASE,
)
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


class ServerOptions(PromptOptions, frozen=True, kw_only=True):
    """Options of every policy that asks a server.

    Attributes:
        base_url: address of the API up to and with "/v1"; "" takes the environment variable OPENAI_BASE_URL.
        api_key_env: name of the environment variable that holds the key; "" sends none.
        timeout: seconds a try may take in all, from connecting to the last byte.
        attempts: tries a request.
        backoff: seconds before the second try at most; doubles with each further one, with jitter.
        max_in_flight: requests at the server at one time.
        temperature, top_p: of sampling; None leaves them to the server.
        max_tokens: longest answer, in tokens.
        price_prompt, price_completion: US dollars a million tokens, for usage["cost"].
    """

    base_url: str = ""
    api_key_env: str = ""
    timeout: Positive = 300.0
    attempts: Count = 6
    backoff: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    max_in_flight: Count = 64
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    max_tokens: Count = 1024
    price_prompt: Annotated[float, msgspec.Meta(ge=0)] | None = None
    price_completion: Annotated[float, msgspec.Meta(ge=0)] | None = None

    def behaviour(self) -> dict[str, Any]:
        """The options that change answers: no address, no name of a key, no patience, no price."""
        return self.describe(
            "base_url",
            "api_key_env",
            "timeout",
            "attempts",
            "backoff",
            "max_in_flight",
            "price_prompt",
            "price_completion",
        )


class ContextOverflow(InfrastructureError):
    """The server refused a prompt because it and the answer do not fit into the model's context."""


class Nonsense(Exception):
    """What a check of an answer raises: the server spoke, but not the protocol. It is tried again."""


class _Transient(Exception):
    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Server:
    """A JSON API behind one base address.

    Args:
        options: address, key, patience.

    Attributes:
        answered: whether there has been a good answer.

    Raises:
        UsageError: if there is no usable address, or the named variable with the key is not set.
    """

    def __init__(self, options: ServerOptions) -> None:
        url = options.base_url or os.environ.get("OPENAI_BASE_URL", "")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError("no server: give its address with base_url=http://HOST:PORT/v1 or set OPENAI_BASE_URL")
        self._url = url.rstrip("/")
        self._key = os.environ.get(options.api_key_env, "").strip() if options.api_key_env else ""
        if options.api_key_env and not self._key:
            raise UsageError(f"the environment variable {options.api_key_env} (api_key_env) is not set")
        if not self._key.isascii():
            raise UsageError(f"the environment variable {options.api_key_env} holds no key: it is not ASCII text")
        self._direct = parts.hostname in _LOCAL  # a proxy could not reach this machine's own servers
        self._options = options
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: httpx.AsyncClient
        self._slots: asyncio.Semaphore
        self._pending: dict[str, list[Future[Any]]] = {}
        self.answered = False

    def start(self, work: Coroutine[Any, Any, T], episode_id: str) -> Future[T]:
        """Runs a coroutine on the background loop, which starts with the first one.

        Args:
            work: what to run.
            episode_id: what to name for `cancel`.
        """
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._client = self._make_client()
                self._slots = asyncio.Semaphore(self._options.max_in_flight)
                self._thread = threading.Thread(target=self._loop.run_forever, name="model server", daemon=True)
                self._thread.start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        running = [old for old in self._pending.get(episode_id, ()) if not old.done()]
        self._pending[episode_id] = [*running, future]
        return future

    def cancel(self, episode_id: str) -> None:
        """Gives up what an episode still waits for."""
        for future in self._pending.pop(episode_id, ()):
            future.cancel()

    def _make_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(
            max_connections=self._options.max_in_flight, max_keepalive_connections=self._options.max_in_flight
        )
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # The total time of a try is bounded in `_try`; httpx would bound each read alone.
        timeout = httpx.Timeout(None, connect=min(10.0, self._options.timeout))
        return httpx.AsyncClient(limits=limits, headers=headers, timeout=timeout, trust_env=not self._direct)

    async def post(self, path: str, body: dict[str, Any], check: Callable[[Any], T]) -> tuple[T, int]:
        """Posts JSON until there is an answer that passes the check.

        Args:
            path: behind the base address, as "/chat/completions".
            body: what to send.
            check: decoded JSON -> what is wanted of it; raises `Nonsense`.

        Returns:
            What `check` gave, and the number of tries it took.

        Raises:
            InfrastructureError: when all tries have failed, or the server refuses the request.
            ContextOverflow: if it refuses the prompt for its length.
            UsageError: if the very first answer says that the key, the address, the model or the length is wrong.
        """
        data = msgspec.json.encode(body)
        tries = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._options.attempts),
            wait=self._wait,
            retry=tenacity.retry_if_exception_type(_Transient),
            reraise=True,
        )
        try:
            async for attempt in tries:
                with attempt:
                    async with self._slots:
                        result = await self._try(path, data, check)
                    return result, attempt.retry_state.attempt_number
        except _Transient as error:
            raise InfrastructureError(
                f"{error}, after {self._options.attempts} tries. Look at the model server's own log; "
                "raise attempts, timeout or lower max_in_flight if it is only slow"
            ) from None
        raise AssertionError("a retry loop ends with a result or an exception")

    def _wait(self, state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        if self._options.backoff:
            wait = float(tenacity.wait_random_exponential(multiplier=self._options.backoff, max=60)(state))
        else:
            wait = 0.0
        asked = getattr(error, "retry_after", None)
        return wait if asked is None else min(asked + min(wait, 1.0), MAX_WAIT)

    async def _try(self, path: str, data: bytes, check: Callable[[Any], T]) -> T:
        try:
            async with asyncio.timeout(self._options.timeout):
                status, headers, body = await self._exchange(path, data)
        except TimeoutError:
            raise _Transient(f"the model server gave no whole answer in {self._options.timeout:g} s") from None
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise _Transient(f"the model server cannot be reached or died ({type(error).__name__})") from None
        if status in _TRANSIENT or status >= 500:
            raise _Transient(f"the model server answered HTTP {status}{self._excerpt(body)}", _retry_after(headers))
        if status != 200:
            what = f"the model server refused the request with HTTP {status}{self._excerpt(body)}"
            if status in (401, 403, 404) and not self.answered:
                raise UsageError(f"{what}. Check the model's name, base_url and api_key_env")
            if status in (400, 413, 422) and _OVERFLOW.search(body):
                if not self.answered:
                    raise UsageError(f"{what}. The first prompt already does not fit; lower max_tokens")
                raise ContextOverflow(what)
            raise InfrastructureError(what)
        try:
            result = check(msgspec.json.decode(body))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _Transient(f"the model server's answer is not JSON{self._excerpt(body)}") from None
        except Nonsense as error:
            raise _Transient(f"the model server's answer makes no sense: {error}{self._excerpt(body)}") from None
        self.answered = True
        return result

    async def _exchange(self, path: str, data: bytes) -> tuple[int, httpx.Headers, bytes]:
        content_type = {"Content-Type": "application/json"}
        async with self._client.stream("POST", self._url + path, content=data, headers=content_type) as response:
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_BODY:
                    raise InfrastructureError(f"the model server's answer is longer than {MAX_BODY} bytes")
            return response.status_code, response.headers, bytes(body)

    def _excerpt(self, body: bytes) -> str:
        """The start of an answer for a message, never with the key in it."""
        text = " ".join(body[:2000].decode(errors="replace").split())
        if self._key:
            text = text.replace(self._key, "(key)")
        return f": {text[:200]}" if text else ""

    def close(self) -> None:
        """Cancels what is under way and ends the background thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._shut_down(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()

    async def _shut_down(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()


def _retry_after(headers: httpx.Headers) -> float | None:
    """Seconds that Retry-After asks to wait: a number, or an HTTP date."""
    value = headers.get("retry-after", "").strip()
    try:
        seconds = float(value)
        return None if math.isnan(seconds) else max(0.0, seconds)
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def read_usage(answer: dict[str, Any], options: ServerOptions, tries: int) -> dict[str, float]:
    """Tokens, cost and calls of an answer in OpenAI's form; counts that are missing or no numbers are left out."""
    usage: dict[str, float] = {"calls": 1.0}
    if tries > 1:
        usage["retries"] = float(tries - 1)
    counts = answer.get("usage")
    if not isinstance(counts, dict):
        return usage
    cost = 0.0
    for name, price in (("prompt_tokens", options.price_prompt), ("completion_tokens", options.price_completion)):
        count = counts.get(name)
        if isinstance(count, int | float) and not isinstance(count, bool) and count >= 0:
            usage[name] = float(count)
            cost += count * (price or 0.0) / 1e6
    if options.price_prompt is not None or options.price_completion is not None:
        usage["cost"] = cost
    return usage


def first_choice(answer: Any) -> dict[str, Any]:
    """The only choice of an answer in OpenAI's form.

    Raises:
        Nonsense: if there is none.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Nonsense("it has no choices")
    return choices[0]
