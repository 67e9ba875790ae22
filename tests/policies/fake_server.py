"""A model server for tests: answers by a script, on 127.0.0.1."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agentgym.policies.base import Context, Request
from tests.worlds import CountEnv

Answer = Callable[["Handler", dict[str, Any]], None]


class Handler(BaseHTTPRequestHandler):
    """One request; the server's `answer` decides what happens."""

    protocol_version = "HTTP/1.1"
    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.authorizations.append(self.headers.get("Authorization"))
            self.server.paths.append(self.path)
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
            number = len(self.server.bodies) - 1
        try:
            script = self.server.script
            script[min(number, len(script) - 1)](self, body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with self.server.lock:
                self.server.now -= 1

    def reply(self, data: Any, status: int = 200, **headers: str) -> None:
        """Sends JSON, or bytes as they are."""
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        with self.server.lock:  # what is counted as in flight ends before the client can send its next request
            self.server.now -= 1
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        with self.server.lock:
            self.server.now += 1

    def die(self) -> None:
        """Promises more than it sends, and hangs up."""
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'{"choices": [')
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


class FakeServer(ThreadingHTTPServer):
    """Records the requests, and how many were there at one time.

    Args:
        script: what to do with each request in turn; the last one serves all further ones.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *script: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = script
        self.lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.paths: list[str] = []
        self.now = self.most = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextmanager
def serve(*script: Answer) -> Iterator[FakeServer]:
    """Runs a server for a while."""
    server = FakeServer(*script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def chat_answer(content: Any, **message: Any) -> dict[str, Any]:
    """A chat completion."""
    return {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content, **message}}],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 20},
    }


def says(text: str, delay: float = 0.0) -> Answer:
    """Answers with a text."""

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        time.sleep(delay)
        handler.reply(chat_answer(text))

    return answer


def gives(data: Any, status: int = 200, **headers: str) -> Answer:
    """Answers with JSON or bytes."""
    return lambda handler, body: handler.reply(data, status, **headers)


def dies(handler: Handler, body: dict[str, Any]) -> None:
    """Hangs up in the middle of the answer."""
    handler.die()


def hangs(handler: Handler, body: dict[str, Any]) -> None:
    """Says nothing for a long while."""
    time.sleep(3)


def drips(handler: Handler, body: dict[str, Any]) -> None:
    """Sends a byte now and then, so that no single read is slow."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(60):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def make_request(turn: int = 0, task: int = 0, **options: Any) -> Request:
    """A request of the counting world."""
    env = CountEnv(**options)
    observation, info = env.reset(seed=0, options={"task": task})
    assert env.task is not None
    context = Context(
        f"{env.task.id}#0#0", env.task, "You count.", env.instruction, env.tools, env.action_format, {}, seed=7 + task
    )
    info["turn"] = turn
    return Request(context, "agent", observation, info, [])
