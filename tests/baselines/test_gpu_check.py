"""The GPU check, rehearsed on the CPU: the same code with small sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentgym.cli import app
from tests.shared_data import need

need("torch")

from agentgym.baselines.cli.gpu_check import _reason  # noqa: E402

CHECKS = (
    "generation in fp32",
    "sampled against whole log-probabilities in fp32",
    "packed against padded batches in fp32",
    "generation in bf16",
    "sampled against whole log-probabilities in bf16",
    "update with LoRA in bf16",
    "update of all weights in bf16",
    "resume from a checkpoint",
    "FSDP2: loss",
    "FSDP2: sampling",
)


def check(out: Path, minutes: float) -> tuple[int, dict[str, Any], str]:
    command = ["gpu-check", "--model", "tiny", "--device", "cpu", "--minutes", str(minutes), "--out", str(out)]
    done = CliRunner().invoke(app, command)
    return done.exit_code, json.loads(out.read_text()), done.output


@pytest.mark.slow
def test_all_checks_pass_on_a_cpu_each_with_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, result, shown = check(tmp_path / "check.json", minutes=4.8)
    checks = {each["name"]: each for each in result["checks"]}
    assert tuple(checks) == CHECKS
    assert all(each["passed"] and each["value"] >= 0 and each["detail"] for each in checks.values()), checks
    assert (code, result["passed"], result["gpus"]) == (0, True, 0)
    assert checks["sampled against whole log-probabilities in fp32"]["value"] < 1e-4
    assert checks["update with LoRA in bf16"]["value"] > 0
    assert checks["FSDP2: loss"]["value"] < 1e-4
    assert "pass" in shown
    assert "FAIL" not in shown


@pytest.mark.slow
def test_what_does_not_run_in_time_has_failed(tmp_path: Path) -> None:
    code, result, shown = check(tmp_path / "check.json", minutes=0.1)
    assert (code, result["passed"]) == (1, False)
    assert not result["checks"][-1]["passed"]
    assert "out of time" in result["checks"][-1]["detail"]
    assert "FAIL" in shown


def test_a_gpu_that_is_not_there_is_a_bad_call(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = CliRunner().invoke(app, ["gpu-check", "--device", "cuda", "--out", str(tmp_path / "check.json")])
    assert done.exit_code != 0
    assert "sees no GPU" in str(done.exception)
    assert not (tmp_path / "check.json").exists()


def test_the_reason_is_the_error_and_not_what_the_launcher_says_of_it() -> None:
    said = "Traceback\nRuntimeError: out of memory\n  raise ChildFailedError(\nsomething.ChildFailedError: \n===="
    assert _reason(said) == "RuntimeError: out of memory"
    assert _reason("error: no such model\n") == "error: no such model"
    assert _reason("nothing") == ""
