"""What a vLLM server needs to take new weights from a folder: a class that vLLM adds to its workers.

The file stands alone, so that it can be copied to where the server runs: it imports nothing of agentgym, and torch and
safetensors are there with vLLM. Start the server with its folder on PYTHONPATH and

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls vllm_worker.WeightWorker

or, where agentgym is installed beside vLLM, with `agentgym.baselines.core.vllm_worker.WeightWorker`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open


class WeightWorker:
    """Methods that POST /collective_rpc can call on each worker; vLLM makes this class a base of its own worker.

    An error is returned, not raised: the caller is to see why, and the server is to live on.
    """

    model_runner: Any  # of vLLM's worker

    def agentgym_load_weights(self, path: str, version: int, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Loads a checkpoint's weights into the running model; all its workers must be asked.

        Args:
            path: folder with *.safetensors, as this worker sees it.
            version: what to call the weights from now on.
            sizes: bytes of each file, as written; nothing is loaded while a file is absent or of another length.

        Returns:
            {"version": ..., "tensors": how many were read}, or {"error": why}.
        """
        folder = Path(path)
        for name, size in sizes.items():
            file = folder / name
            if not file.is_file():
                return {"error": f"{file} is not there; the folder must be shared with the server under one path"}
            if file.stat().st_size != size:
                return {"error": f"{file} has {file.stat().st_size} of {size} bytes"}
        self._agentgym_version = -1  # neither the old weights nor the new ones until all are there
        read: list[str] = []
        try:
            unloaded = self._agentgym_load([folder / name for name in sizes], read)
        except Exception as error:
            return {"error": f"loading stopped after {len(read)} tensors ({type(error).__name__}: {error})"}
        if unloaded:
            return {"error": f"the checkpoint lacks {len(unloaded)} parameters of the served model: {unloaded[:5]}"}
        self._agentgym_version = version
        return {"version": version, "tensors": len(read)}

    def agentgym_weights_version(self) -> dict[str, Any]:
        """{"version": ...} of the last weights that were loaded whole; 0 for those the server was started with."""
        return {"version": getattr(self, "_agentgym_version", 0)}

    def _agentgym_load(self, files: list[Path], read: list[str]) -> list[str]:
        """Names of the parameters that the files did not fill."""
        runner = self.model_runner
        model = runner.get_model() if hasattr(runner, "get_model") else runner.model
        expected = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        seen: list[set[str] | None] = []
        load = model.load_weights

        def noting(weights: Any) -> Any:
            seen.append(load(weights))
            return seen[-1]

        reload = getattr(runner, "reload_weights", None)
        if reload is not None and "weights_iterator" in inspect.signature(reload).parameters:
            # Newer releases: also right where the kernels keep weights in a layout of their own, as on CPUs.
            model.load_weights = noting
            try:
                self.reload_weights(weights_iterator=_tensors(files, read))  # type: ignore[attr-defined]
            finally:
                del model.load_weights
            _pack_tied_heads(model)
        else:
            noting(_tensors(files, read))
        filled = seen[-1] if seen else None
        return [] if filled is None else sorted(expected - filled)


def _pack_tied_heads(model: Any) -> None:
    """Packs again, from the new weights, what an output layer tied to the embeddings computes with on CPUs.

    vLLM 0.32 packs such a layer at the start, and leaves the packed copy as it was when it reloads: no tensor of the
    checkpoint bears the layer's own name. The answers would be of new weights but for the last layer.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if (
            hasattr(layer, "cpu_linear")
            and method is not None
            and hasattr(method, "embedding")
            and layer.weight.numel()
        ):
            method.process_weights_after_loading(layer)


def _tensors(files: list[Path], read: list[str]) -> Iterator[tuple[str, Any]]:
    """Names and tensors of all files in turn; notes the names in `read`."""
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - no dictionary
                read.append(name)
                yield name, opened.get_tensor(name)
