"""`agentgym gpu-check`: runs what training does on a GPU, small, and says what works and how fast.

Each part runs in processes of its own (`agentgym.baselines.cli.gpu_probe` and trainings), so that running out of memory
in one leaves the others alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentgym.errors import UsageError

FSDP = {  # what `accelerate launch --config_file baselines/configs/accelerate/fsdp2.yaml` sets
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was tried.

    Attributes:
        name: what.
        passed: whether it did what it must.
        value, unit: the number that was measured.
        detail: the bound, further numbers, or the error.
    """

    name: str
    passed: bool
    value: float | None = None
    unit: str = ""
    detail: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and how large.

    Attributes:
        model: name or folder.
        cuda: on a GPU.
        devices: how many processes a sharded run has.
        work: folder for runs.
        episodes, turns, tokens: played at once, turns of each, new tokens of each turn.
        tasks, token_budget: expert episodes an update, and tokens of one forward.
    """

    model: str
    cuda: bool
    devices: int
    work: str
    episodes: int
    turns: int
    tokens: int
    tasks: int
    token_budget: int


def gpu_check(
    model: Annotated[str, typer.Option(help="tiny, smollm2-135m, a folder, or a hub id.")] = "tiny",
    minutes: Annotated[float, typer.Option(min=0.1, help="What has not run by then counts as failed.")] = 10.0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the result goes as JSON.")] = Path("gpu-check.json"),
) -> None:
    """Tries generation, updates, packing, sharding and resuming on what is there; exit code 1 if one fails."""
    from agentgym.errors import require_extra

    for package in ("torch", "transformers", "accelerate", "peft"):
        require_extra(package, extra="train")
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device takes auto, cpu or cuda, not {device!r}")
    about = describe(device)
    count = about["gpus"]
    if device == "cuda" and not count:
        raise UsageError("torch sees no GPU: install a CUDA build of torch and a driver, or give --device cpu")
    console = Console()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as work:
        plan = make_plan(model, work, cuda=bool(count), devices=count or 2)
        checks = run_checks(plan, seconds=60 * minutes, tell=lambda what: console.print(f"{what} ...", style="dim"))
    passed = all(check.passed for check in checks)
    result = {"model": model, **about, "passed": passed, "checks": msgspec.to_builtins(checks)}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    console.print(table(about, checks))
    console.print(f"Written to {escape(str(out))}", highlight=False, soft_wrap=True)
    if not passed:
        raise typer.Exit(1)


def describe(device: str) -> dict[str, Any]:
    """Device and versions; 0 GPUs where `device` is "cpu"."""
    from importlib import metadata

    import torch

    count = 0 if device == "cpu" else torch.cuda.device_count()
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    packages = ("agentgym-suite", "torch", "transformers", "accelerate", "peft")
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed as a package"
    memory = [torch.cuda.get_device_properties(index).total_memory / 2**30 for index in range(count)]
    return {
        "device": ", ".join(dict.fromkeys(names)) or f"CPU, {os.cpu_count()} cores",
        "gpus": count,
        "gpu_memory_gib": [round(size, 1) for size in memory],
        "cuda": torch.version.cuda if count else None,
        "python": sys.version.split()[0],
        "versions": versions,
    }


def make_plan(model: str, work: str, *, cuda: bool, devices: int) -> Plan:
    """Sizes that fit ten minutes: on a GPU, or as a rehearsal on the CPU."""
    sizes = (
        {"episodes": 64, "turns": 20, "tokens": 16, "tasks": 64, "token_budget": 16384}
        if cuda
        else {"episodes": 4, "turns": 5, "tokens": 6, "tasks": 3, "token_budget": 2048}
    )
    return Plan(model=model, cuda=cuda, devices=devices, work=work, **sizes)


def run_checks(plan: Plan, *, seconds: float, tell: Callable[[str], None]) -> list[Check]:
    """All checks, one after the other.

    Args:
        plan: see `Plan`.
        seconds: for all of them.
        tell: is told what begins.
    """
    until = time.monotonic() + seconds
    runner = _Runner(plan, until)
    checks: list[Check] = []
    for name, part in (
        ("generation and log-probabilities", runner.sampling),
        ("update with LoRA in bf16", lambda: runner.update("lora")),
        ("update of all weights in bf16", lambda: runner.update("full")),
        ("a run continued from its checkpoint", runner.resume),
        (f"weights spread over {plan.devices} process(es) (FSDP2)", runner.sharded),
    ):
        tell(name)
        try:
            checks += part()
        except _Failed as error:
            checks.append(Check(name=name, passed=False, detail=str(error)))
    return checks


class _Failed(Exception):
    """A process that did not end well."""


class _Runner:
    """Starts the processes."""

    def __init__(self, plan: Plan, until: float) -> None:
        self._plan = plan
        self._until = until
        self._work = Path(plan.work)

    def sampling(self) -> list[Check]:
        return self._probe("sampling")

    def update(self, kind: Literal["lora", "full"]) -> list[Check]:
        return self._probe(f"update-{kind}")

    def resume(self) -> list[Check]:
        whole = self._train("whole", 3)
        self._train("broken", 1)
        again = self._train("broken", 3, "--resume")
        bound = 1e-3 if self._plan.cuda else 1e-6  # sums on a GPU have no fixed order
        difference = abs(whole[-1] - again[-1])
        detail = f"loss {again[-1]:.4f}, at most {bound:g} from that of an unbroken run"
        name = "resume from a checkpoint"
        return [Check(name=name, passed=difference <= bound, value=difference, unit="loss", detail=detail)]

    def sharded(self) -> list[Check]:
        from agentgym.baselines.core.record import read_metrics

        count = self._plan.devices
        launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
        spread = self._train("spread", 3, launch=launch, env=FSDP)
        whole = self._losses("whole")
        difference = max(abs(a - b) for a, b in zip(whole, spread, strict=True))
        detail = f"{count} process(es), at most 0.001 from the loss of one"
        [score] = [line for line in read_metrics(self._work / "spread") if line["kind"] == "eval"]
        played = f"{score['episodes']} episodes, {score['faults']} faults"
        name = "FSDP2"
        return [
            Check(name=f"{name}: loss", passed=difference <= 1e-3, value=difference, unit="loss", detail=detail),
            Check(
                name=f"{name}: sampling",
                passed=score["episodes"] > 0 and not score["faults"],
                value=score["evaluation_seconds"],
                unit="s",
                detail=played,
            ),
        ]

    def _probe(self, name: str) -> list[Check]:
        """Runs a part of `agentgym.baselines.cli.gpu_probe`."""
        plan = msgspec.json.encode(self._plan).decode()
        result = self._work / f"{name}.json"
        self._start("-m", "agentgym.baselines.cli.gpu_probe", name, plan, str(result))
        return msgspec.json.decode(result.read_bytes(), type=list[Check])

    def _train(
        self, name: str, iterations: int, *options: str, launch: tuple[str, ...] = (), env: Mapping[str, str] = {}
    ) -> list[float]:
        """A training in fp32; the loss of each iteration."""
        from agentgym.baselines.cli.gpu_probe import train_config
        from agentgym.baselines.core.config import write_train_config

        config = self._work / f"{name}.toml"
        write_train_config(config, train_config(self._plan, iterations=iterations))
        module = ("-m", "agentgym.baselines.core.run")
        self._start(*launch, *module, str(config), "--out", str(self._work / name), *options, env=env)
        return self._losses(name)

    def _losses(self, name: str) -> list[float]:
        from agentgym.baselines.core.record import read_metrics

        return [line["loss/ce"] for line in read_metrics(self._work / name) if line["kind"] == "train"]

    def _start(self, *arguments: str, env: Mapping[str, str] = {}) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise _Failed("not run: out of time (--minutes)")
        # A launch around this command must not reach into the processes that it starts.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCH)}
        hidden = {} if self._plan.cuda else {"CUDA_VISIBLE_DEVICES": ""}
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        # Pipes of a process that was ended may be held by its children: files end with it.
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env={**inherited, **threads, **hidden, **env},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=left)
            except subprocess.TimeoutExpired:
                raise _Failed("broken off: out of time (--minutes)") from None
            finally:
                _end(process)
            log.seek(0)
            said = log.read().decode(errors="replace")
        if code:
            raise _Failed(_reason(said) or f"exit code {code}")


_LAUNCH = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(said: str) -> str:
    """The last line that names an error."""
    lines = [line for line in said.splitlines() if "Error" in line or line.startswith(("error:", "stopped:"))]
    wanted = [line for line in lines if "ChildFailedError" not in line]
    return (wanted or lines or [""])[-1][:300]


def table(about: Mapping[str, Any], checks: list[Check]) -> Table:
    """What a person reads."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    shown = Table("Check", "", "Value", "Detail", title=f"{about['device']} ({about['gpus']} GPUs)", caption=versions)
    for check in checks:
        value = "" if check.value is None else f"{check.value:.4g} {check.unit}"
        shown.add_row(
            escape(check.name), "[green]pass[/]" if check.passed else "[red]FAIL[/]", value, escape(check.detail)
        )
    return shown
