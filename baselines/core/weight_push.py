"""New weights for a running vLLM server after each update, through a folder that trainer and server share.

A push writes the weights (adapters merged) as safetensors, then asks the server to

    finish what it is answering and hold back what comes     POST /pause?mode=wait       (servers that have it)
    load the files, on every worker                          POST /collective_rpc agentgym_load_weights
    name the version it now has, on every worker             POST /collective_rpc agentgym_weights_version
    forget the keys and values of the old weights            POST /reset_prefix_cache
    go on                                                    POST /resume
    say what it thinks of a few tokens                       POST /v1/completions with prompt_logprobs

so that every answer is of one version, and the last one shows that server and trainer compute the same. The server must
run with VLLM_SERVER_DEV_MODE=1, which opens these addresses to whoever reaches it: keep it off public networks.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx
import msgspec
import tenacity
import torch
from torch import Tensor

from agentgym.errors import DataError, InfrastructureError, UsageError

START = (
    "Start it with VLLM_SERVER_DEV_MODE=1, the folder of agentgym/baselines/core/vllm_worker.py (or of a copy) on "
    "PYTHONPATH, and --worker-extension-cls vllm_worker.WeightWorker"
)
_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class Versioned(Protocol):
    """A policy that records with each reply which weights it came from."""

    version: int


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    """What a push did.

    Attributes:
        version: the server has it, on every worker.
        bytes: of the weights.
        seconds: in all.
        saving: of it, until the weights were written.
        difference: mean absolute difference between the server's and the trainer's log-probabilities of the probe's
            tokens, in nats; None without a probe.
    """

    version: int
    bytes: int
    seconds: float
    saving: float
    difference: float | None = None


class _Transient(Exception):
    pass


class WeightPush:
    """Keeps a vLLM server at the trainer's weights.

    Args:
        base_url: address of the server as the `vllm` policy has it, with or without "/v1".
        folder: folder of this trainer alone, which the server's machine sees under the same path; made if need be.
        served: name of the model at the server.
        policy: its `version` is set after each push.
        probe: ids of a few tokens to compare the server's and the trainer's log-probabilities on; empty for no check.
        tolerance: largest mean difference allowed, in nats a token. With float32 on both sides 1e-3 is enough and finds
            a single layer that was not loaded; bfloat16 makes some 0.04, on one side alone 0.12.
        dtype: name of a torch type to write the weights in, such as "bfloat16"; None for the trainer's own.
        api_key_env: name of the environment variable that holds the server's key.
        timeout: seconds a request may take, the wait for running answers and the loading included.
        attempts: tries a request.
        backoff: seconds before the second try; doubles with each further one.

    Attributes:
        version: of the last push that was confirmed; None before the first.

    Raises:
        UsageError: for an address or type that cannot be, or a key that is not set.
    """

    def __init__(
        self,
        base_url: str,
        folder: Path,
        served: str,
        *,
        policy: Versioned | None = None,
        probe: Sequence[int] = (),
        tolerance: float = 0.2,
        dtype: str | None = None,
        api_key_env: str = "",
        timeout: float = 300.0,
        attempts: int = 5,
        backoff: float = 1.0,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"no server: {base_url!r} is no address; give http://HOST:PORT/v1")
        if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise UsageError(f"unknown type {dtype!r} of weights; take float32, bfloat16 or float16")
        if len(probe) == 1 or tolerance <= 0:
            raise UsageError("a probe has at least two tokens, and a tolerance above 0")
        key = os.environ.get(api_key_env, "").strip() if api_key_env else ""
        if api_key_env and not key:
            raise UsageError(f"the environment variable {api_key_env} (api_key_env) is not set")
        self.version: int | None = None
        self._url = base_url.rstrip("/").removesuffix("/v1")
        self._folder = folder.resolve()
        self._served, self._policy = served, policy
        self._probe, self._tolerance = list(probe), tolerance
        self._dtype: torch.dtype | None = getattr(torch, dtype) if dtype else None
        self._timeout, self._attempts, self._backoff = timeout, attempts, backoff
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout, connect=min(10.0, timeout)),
            trust_env=parts.hostname not in ("localhost", "127.0.0.1", "::1"),  # no proxy reaches this machine itself
        )

    def push(self, model: Any, version: int, state: Mapping[str, Tensor] | None = None) -> Pushed:
        """Makes the server answer with this model's weights; returns when it does.

        Args:
            model: a transformers or peft model; it is not changed.
            version: number of updates it has seen.
            state: its full weights, where the model itself holds only a part of them (FSDP, DeepSpeed); these cannot
                be compared by the probe.

        Raises:
            InfrastructureError: if the server cannot be made to. Where loading failed it is left paused, so that nobody
                is answered by half-loaded weights: mend what the message names and push again, or restart it.
            DataError: if the weights cannot be written.
            UsageError: for a model whose weights vLLM cannot take.
        """
        start = time.monotonic()
        saved, sizes = save_weights(model, self._folder, version, state=state, dtype=self._dtype)
        saving = time.monotonic() - start
        pauses = self._post("/pause?mode=wait", absent_is_fine=True) is not None
        load = {"path": str(saved), "version": version, "sizes": sizes}
        for answer in (self._rpc("agentgym_load_weights", load), self._rpc("agentgym_weights_version", {})):
            if any(worker.get("version") != version for worker in answer):
                raise InfrastructureError(
                    f"the vLLM server has other weights than version {version}, which was pushed: {answer}. "
                    "Is another trainer pushing to it? Give each its own server"
                )
        self._reset()
        if pauses:
            self._post("/resume")
        difference = self._compare(model, version) if self._probe and state is None else None
        self.version = version
        if self._policy is not None:
            self._policy.version = version
        for old in self._folder.glob("v[0-9]*"):
            if old != saved:
                shutil.rmtree(old, ignore_errors=True)
        return Pushed(
            version=version,
            bytes=sum(sizes.values()),
            seconds=time.monotonic() - start,
            saving=saving,
            difference=difference,
        )

    def close(self) -> None:
        """Ends the connection; the last weights stay in the folder."""
        self._client.close()

    def _rpc(self, method: str, options: dict[str, Any]) -> list[dict[str, Any]]:
        """Calls a method of `WeightWorker` on every worker; one answer each."""
        answer = self._post("/collective_rpc", {"method": method, "kwargs": options, "timeout": self._timeout})
        results = answer.get("results") if answer else None
        if not isinstance(results, list) or not results or not all(isinstance(result, dict) for result in results):
            raise InfrastructureError(f"the vLLM server's workers did not answer {method}: {answer}. {START}")
        for result in results:
            if "error" in result:
                raise InfrastructureError(
                    f"a worker of the vLLM server could not load the weights: {result['error']}. It must serve the "
                    "model that is trained, and see the folder of the weights under the trainer's path"
                )
        return results

    def _reset(self) -> None:
        """Empties the prefix cache; it cannot be while requests run, which is over soon if nobody sends more."""
        for attempt in range(self._attempts):
            answer = self._post("/reset_prefix_cache")
            if not answer or answer.get("success", True):  # older releases answer nothing
                return
            time.sleep(self._backoff * 2**attempt)
        raise InfrastructureError(
            "the vLLM server does not empty its prefix cache, whose entries are of the old weights: requests are still "
            "running. Push between rollouts, or use a release of vLLM that has POST /pause"
        )

    def _compare(self, model: Any, version: int) -> float:
        """Mean absolute difference of log-probabilities between server and trainer, nats a token."""
        served = self.served_logprobs(self._probe)
        own = token_logprobs(model, self._probe)
        difference = math.fsum(abs(a - b) for a, b in zip(served, own, strict=True)) / len(own)
        if not difference <= self._tolerance:
            raise InfrastructureError(
                f"after loading version {version} the vLLM server's log-probabilities differ from the "
                f"trainer's by {difference:.3g} nats a token (allowed: {self._tolerance:g}). Does it serve the trained "
                "model, unquantised? Raise the tolerance if its precision explains the difference"
            )
        return difference

    def served_logprobs(self, ids: Sequence[int]) -> list[float]:
        """The server's log-probabilities of all of these tokens but the first, given those before each.

        Args:
            ids: of tokens, at least two.

        Raises:
            InfrastructureError: if the server does not give them.
        """
        body = {"model": self._served, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = self._post("/v1/completions", body)
        try:
            given = (answer or {})["choices"][0]["prompt_logprobs"]
            return [float(place[str(token)]["logprob"]) for place, token in zip(given[1:], ids[1:], strict=True)]
        except (KeyError, IndexError, TypeError, ValueError):
            raise InfrastructureError(
                f"the vLLM server gives no prompt_logprobs for model {self._served!r}; update it to 0.10.2 or newer"
            ) from None

    def _post(
        self, path: str, body: dict[str, Any] | None = None, *, absent_is_fine: bool = False
    ) -> dict[str, Any] | None:
        """Posts until there is an answer; {} for an empty one, None where there is no such address."""
        tries = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self._attempts),
            wait=tenacity.wait_exponential(multiplier=self._backoff, max=60),
            retry=tenacity.retry_if_exception_type(_Transient),
            reraise=True,
        )
        try:
            response = tries(self._try, path, body)
        except _Transient as error:
            raise InfrastructureError(
                f"the vLLM server at {self._url} {error}, {self._attempts} times. Look at its own log; "
                "raise timeout or attempts if it is only slow"
            ) from None
        if response.status_code == 404 and absent_is_fine:
            return None
        if response.status_code != 200:
            excerpt = " ".join(response.text[:300].split())
            mend = START if response.status_code in (404, 405, 500) else "Check the address, the key and served="
            raise InfrastructureError(
                f"the vLLM server refused POST {path} with HTTP {response.status_code}: {excerpt}. {mend}"
            )
        try:
            answer = response.json() if response.content else {}
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise InfrastructureError(f"{self._url}{path} did not answer as vLLM does. Check the address")
        return answer

    def _try(self, path: str, body: dict[str, Any] | None) -> httpx.Response:
        try:
            response = self._client.post(self._url + path, json=body or {})
        except httpx.TimeoutException:
            raise _Transient(f"did not answer POST {path} in {self._timeout:g} s") from None
        except httpx.TransportError as error:
            raise _Transient(f"cannot be reached or died ({type(error).__name__})") from None
        if (
            response.status_code in _TRANSIENT and "agentgym_" not in response.text
        ):  # it lacks our class: no use to wait
            raise _Transient(f"answered POST {path} with HTTP {response.status_code}: {response.text[:200]}")
        return response


def save_weights(
    model: Any,
    folder: Path,
    version: int,
    *,
    state: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Path, dict[str, int]]:
    """Writes a model's weights, adapters merged, as `folder`/v`version`; it appears at once and whole.

    Args:
        model: a transformers or peft model.
        folder: where to; made if need be.
        version: names the result, which replaces an older one of that name.
        state: full weights instead of the model's own.
        dtype: type to write.

    Returns:
        The result's folder, and the bytes of each of its safetensors files by name.

    Raises:
        DataError: if it cannot be written.
        UsageError: for a quantised model, or adapters that are no peft model.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
    weights = dict(state) if state is not None else merged_weights(model)
    if dtype is not None:
        weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}
    target = folder / f"v{version}"
    part: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for remains in folder.glob(".part-*"):  # of a push that was killed
            shutil.rmtree(remains)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
        base.save_pretrained(part, state_dict=weights)
        for path, mode in ((part, 0o755), *((file, 0o644) for file in part.iterdir())):
            path.chmod(mode)  # the server may run as another user
        sizes = {file.name: file.stat().st_size for file in sorted(part.glob("*.safetensors"))}
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)
    except OSError as error:
        raise DataError(folder, f"the weights cannot be written ({error})", "Free space, or choose another") from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
    return target, sizes


def merged_weights(model: Any) -> dict[str, Tensor]:
    """A model's weights under the names of the model without adapters; the active adapters are added in.

    The model is not changed, and no more than its adapted layers are copied.

    Raises:
        UsageError: for a quantised model, or adapters that are no peft model.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UsageError("the model has adapters but is no peft model; make them with peft.get_peft_model")
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    if getattr(base, "is_quantized", False):
        raise UsageError("a quantised model cannot be pushed: vLLM takes whole weights; load the model unquantised")
    weights: dict[str, Tensor] = {}
    done: tuple[str, ...] = ()
    for name, module in base.named_modules() if base is not model else ():
        if not name.startswith(done) and (whole := _merged(module)) is not None:
            done += (f"{name}.",)
            weights |= {f"{name}.{key}": value for key, value in whole.state_dict().items()}
    for name, value in base.state_dict().items():
        if not name.startswith(done):
            weights[name] = value
    return weights


def _merged(module: torch.nn.Module) -> torch.nn.Module | None:
    """The plain layer that does what an adapted one does; None for a module that is not adapted itself."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    layer: torch.nn.Module
    if isinstance(module, ModulesToSaveWrapper):
        active = [] if module.disable_adapters else module.active_adapters
        layer = module.modules_to_save[active[0]] if active else module.original_module
        return layer
    if isinstance(module, AuxiliaryTrainingWrapper):
        raise UsageError(f"weights of {type(module).__name__} cannot be merged; train whole modules or LoRA")
    if not isinstance(module, BaseTunerLayer):
        return None
    if module.disable_adapters:
        layer = module.get_base_layer()
        return layer
    merged = copy.deepcopy(module)
    with torch.no_grad():
        merged.merge()
    layer = merged.get_base_layer()
    return layer


def token_logprobs(model: Any, ids: Sequence[int]) -> list[float]:
    """The model's log-probabilities of all of these tokens but the first, given those before each; no dropout."""
    trains = model.training
    model.eval()
    try:
        batch = torch.tensor([list(ids)], device=next(model.parameters()).device)
        with torch.no_grad():
            logits = model(input_ids=batch).logits[0, :-1].float()
        logp: list[float] = logits.log_softmax(-1).gather(-1, batch[0, 1:, None]).squeeze(-1).tolist()
        return logp
    finally:
        model.train(trains)
