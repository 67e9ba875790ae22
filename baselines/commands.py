"""The commands of this floor: train, methods, study, samples, gpu-check. Nothing heavy is imported before one runs."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    from agentgym.baselines.cli import gpu_check, methods, samples, train
    from agentgym.baselines.study.command import study

    app.command("train")(train.train)
    app.command("methods")(methods.methods)
    app.command("study")(study)
    app.command("samples")(samples.samples)
    app.command("gpu-check")(gpu_check.gpu_check)
