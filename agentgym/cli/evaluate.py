"""`agentgym eval`: plays episodes into a run directory."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from agentgym.cli.options import Backend, EnvOptions, Tasks, Workers, env_kwargs, key_values
from agentgym.cli.progress import EvalProgress
from agentgym.episode import RunConfig, read_config
from agentgym.errors import UsageError
from agentgym.evaluate import PolicySpec, plan, policies_of
from agentgym.evaluate import evaluate as evaluate_plan
from agentgym.view.report import write_report
from agentgym.view.table import run_table
from agentgym.workers import TimeLimits

REPORT = "report.html"


def evaluate(
    context: typer.Context,
    env: Annotated[str, typer.Option("--env", "-e", help="Environment: a family name or a full id.")] = "alfworld",
    policy: Annotated[
        str,
        typer.Option("--policy", "-p", help="random, scripted, expert, human, openai_compatible, hf:PATH, vllm ..."),
    ] = "random",
    policy_option: Annotated[
        list[str] | None,
        typer.Option("--policy-option", "-P", metavar="KEY=VALUE", help="Option of the policy; may be repeated."),
    ] = None,
    tasks: Tasks = None,
    split: Annotated[str, typer.Option(help="Split of the task set.")] = "test",
    episodes: Annotated[
        int | None, typer.Option("--episodes", "-n", min=1, help="Number of episodes. [default: the whole split]")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Episodes a task, for pass@k.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every reset and of the policy's draws.")] = 0,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Turn limit. [default: the family's]")] = None,
    env_option: EnvOptions = None,
    backend: Backend = "processes",
    workers: Workers = 1,
    envs_per_worker: Annotated[int, typer.Option(min=1, help="Episodes that share one worker.")] = 1,
    retries: Annotated[int, typer.Option(min=0, help="Times a faulted episode is tried again.")] = 1,
    reset_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds a reset may take.")] = 120.0,
    step_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds a step may take.")] = 60.0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run directory. [default: runs/ENV-POLICY-TIME]")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Continue this run directory; what it plays is read from it.")
    ] = None,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html beside the log.")] = True,
) -> None:
    """Evaluates a policy on an environment: log, summary, table and report. Stop it at any time, then --resume."""
    console = Console()
    if resume is not None:
        if out is not None and out != resume:
            raise UsageError("give either --resume RUN or --out, not two different directories")
        _refuse_other_plan(context)
        config = read_config(resume)
        specs, out = policies_of(config), resume
    else:
        limits = TimeLimits(reset_timeout, step_timeout)
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        short = "-".join((env.rsplit("/", 1)[-1], policy.split(":", 1)[0], stamp, secrets.token_hex(2)))
        out = out or Path("runs") / short
        specs = {"*": PolicySpec(spec=policy, options=key_values(policy_option, option="--policy-option"))}
        config = plan(
            env,
            env_kwargs=env_kwargs(env_option, tasks, max_turns),
            split=split,
            episodes=episodes,
            repeats=repeats,
            seed=seed,
            retries=retries,
            limits=limits,
            name=out.name,
        )
    try:
        run_plan(
            config,
            specs,
            out,
            resume=resume is not None,
            backend=backend,
            workers=workers,
            envs_per_worker=envs_per_worker,
            console=console,
        )
    except KeyboardInterrupt:
        console.print(f"\nStopped. Continue with: agentgym eval --resume {escape(str(out))}", highlight=False)
        raise typer.Exit(130) from None
    if report:
        written = write_report([out], out / REPORT)
        console.print(f"Report: {written}", highlight=False, soft_wrap=True)
    console.print(f"Run:    {out}", highlight=False, soft_wrap=True)


_PLAN = ("env", "policy", "policy_option", "tasks", "split", "episodes", "repeats", "seed", "max_turns", "env_option")


def _refuse_other_plan(context: typer.Context) -> None:
    """A resumed run plays what its run.toml says; options that would say otherwise are an error, not ignored."""
    for name in _PLAN:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"--resume continues the run as its run.toml says; leave --{name.replace('_', '-')} out, "
                "or start another run with --out"
            )


def run_plan(
    config: RunConfig,
    specs: dict[str, PolicySpec],
    out: Path,
    *,
    resume: bool,
    backend: str,
    workers: int,
    envs_per_worker: int,
    console: Console,
) -> None:
    """Plays a plan with a progress display, then prints its table."""

    def notice(text: str) -> None:
        console.print(f"[yellow]note:[/] {escape(text)}", soft_wrap=True, highlight=False)

    total = len(config.tasks) * config.repeats
    with (
        _sigterm_interrupts(),
        EvalProgress(Console(stderr=True), total, label="/".join(s.spec for s in specs.values())) as progress,
    ):
        summary = evaluate_plan(
            config,
            specs,
            out,
            resume=resume,
            backend=backend,
            workers=workers,
            envs_per_worker=envs_per_worker,
            on_begin=progress.begin,
            on_episode=progress.advance,
            notice=notice,
        )
    console.print(run_table(summary, read_config(out)))


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does: workers are stopped and the log is closed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread: the caller handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
