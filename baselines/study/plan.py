"""A study file and the runs that follow from it.

[study]
name = "study-s"
baseline = "grpo"
seeds = [0, 1, 2]
max_env_steps = 120000          # the budget, the same for all methods
max_tokens = 4000000
[[study.cold_starts]]
name = "a"
model = "runs/cold/s-a"
[train]                         # settings of `agentgym train`, the same for all methods
env = "alfworld"
iterations = 60
[train.method_options]          # and numbers of the method that all share
step_cost = 0.005
[[method]]
name = "gigpo-mean"
label = "GiGPO, centred only"
method = "gigpo"
options = { mode = "mean_norm" }
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentgym.baselines.core.config import make_train_config, merge
from agentgym.baselines.core.method import make_method
from agentgym.errors import DataError, UsageError, choices
from agentgym.task import canonical_json

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}")
_OWN = ("method", "seed", "model", "max_env_steps", "max_tokens")  # settings that the plan itself gives a run
_SHARED = (
    "iterations",
    "evaluation",
    "env",
    "env_kwargs",
    "kinds",
)  # what a method may not change: the comparison's ground


class ColdStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model from which runs start.

    Attributes:
        name: in ids and tables.
        model: its folder.
        seeds: seeds of the runs that start from it; the study's own where none are given.
    """

    name: str
    model: str
    seeds: tuple[int, ...] = ()


class StudyTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table [study].

    Attributes:
        name: of the folder of its results.
        cold_starts: see `ColdStart`.
        seeds: of the runs of every cold start that names none.
        baseline: name of the method with which the others are compared; the first where none is given.
        parallel: runs at a time.
        max_env_steps: budget of a run in environment steps; 0 for none.
        max_tokens: budget in tokens, generated ones and those of extra scoring passes together; 0 for none.
        threshold: held-out success whose first iteration is reported.
        title: heading of the report.
        tuning: what was tuned beforehand, on what budget, in words.
    """

    name: str
    cold_starts: tuple[ColdStart, ...]
    seeds: tuple[int, ...] = ()
    baseline: str = ""
    parallel: int = 2
    max_env_steps: int = 0
    max_tokens: int = 0
    threshold: float = 0.7
    title: str = ""
    tuning: str = ""


class MethodEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One compared method.

    Attributes:
        name: in ids; unique in the study.
        label: in tables and charts; the name where none is given.
        method: as in `agentgym train --method`; the name where none is given.
        group: heading of the small chart in which its curve is drawn.
        options: numbers of the method.
        train: settings of the trainer that only this method has.
    """

    name: str
    label: str = ""
    method: str = ""
    group: str = ""
    options: dict[str, Any] = {}
    train: dict[str, Any] = {}

    @property
    def shown(self) -> str:
        """The label, or the name."""
        return self.label or self.name

    @property
    def trainer_name(self) -> str:
        """The method as the trainer knows it."""
        return self.method or self.name


class Study(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole study file."""

    study: StudyTable
    train: dict[str, Any]
    method: tuple[MethodEntry, ...]

    @property
    def baseline(self) -> str:
        """Name of the method with which the others are compared."""
        return self.study.baseline or self.method[0].name


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        id: method+coldstart+seed.
        method: its entry.
        cold_start: its cold start.
        seed: its seed.
        config: settings of the trainer.
    """

    id: str
    method: MethodEntry
    cold_start: ColdStart
    seed: int
    config: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that decide the result; where the cold start lies is left out, its digest is kept apart."""
        return {key: value for key, value in self.config.items() if key != "model"}

    @property
    def digest(self) -> str:
        """Digest of the settings."""
        return hashlib.sha256(canonical_json(self.settings)).hexdigest()

    @property
    def iterations(self) -> int:
        """Iterations of the run where its budget does not end it before."""
        return int(self.config["iterations"])

    @property
    def evaluated_every(self) -> int:
        """Iterations between evaluations."""
        return int(self.config["evaluation"]["every"])

    @property
    def models(self) -> tuple[str, ...]:
        """Folders of the models that it reads: the cold start, and the teacher where there is one."""
        return (self.cold_start.model, *([self.config["teacher"]] if self.config.get("teacher") else []))


def read_study(path: Path) -> Study:
    """Reads and checks a study file.

    Raises:
        DataError: if it is no such file, or it contradicts itself.
    """
    try:
        study = msgspec.toml.decode(path.read_bytes(), type=Study)
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})", "Give the path of a study file") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            path, f"is no study file ({error})", "Correct it; baselines/configs/study-s.toml shows one"
        ) from error
    problem = _problem(study)
    if problem:
        raise DataError(path, problem, "Correct the study file")
    return study


def _problem(study: Study) -> str:
    """What is wrong with a study, or ""."""
    table = study.study
    if not table.cold_starts or not study.method:
        return "a study needs at least one [[study.cold_starts]] and one [[method]]"
    names = [*(m.name for m in study.method), *(c.name for c in table.cold_starts), table.name]
    for name in names:
        if not _NAME.fullmatch(name):
            return f"the name {name!r} may only have letters, digits, '.', '_' and '-', 60 at most"
    if double := _double([m.name for m in study.method]) or _double([c.name for c in table.cold_starts]):
        return f"two methods, or two cold starts, are named {double!r}"
    for start in table.cold_starts:
        seeds = start.seeds or table.seeds
        if not seeds:
            return f"cold start {start.name!r} has no seeds and [study] has none either"
        if (double := _double(seeds)) is not None:
            return f"seed {double} occurs twice for cold start {start.name!r}"
    if study.baseline not in [m.name for m in study.method]:
        return f"the baseline {study.baseline!r} is no method of the study"
    evaluation = study.train.get("evaluation")
    if not isinstance(evaluation, dict):
        return "[train.evaluation] is missing"
    every = evaluation.get("every")
    for key, value in (("iterations", study.train.get("iterations")), ("evaluation.every", every)):
        if not isinstance(value, int) or value < 1:
            return f"[train] needs {key}, a whole number of at least 1"
    if every > study.train["iterations"] or not evaluation.get("greedy", True):
        return "[train.evaluation] must allow for an evaluation before the last one, and for a greedy one at the end"
    if set(_OWN) & set(study.train):
        given = ", ".join(sorted(set(_OWN) & set(study.train)))
        return f"[train] gives {given}, which the study sets itself: see [study] and [[method]]"
    for entry in study.method:
        if fixed := {*_OWN, *_SHARED, "method_options"} & set(entry.train):
            return f"[method.train] of {entry.name!r} changes {', '.join(sorted(fixed))}, which all methods must share"
    if table.parallel < 1 or table.max_env_steps < 0 or table.max_tokens < 0:
        return "[study] needs parallel >= 1 and a budget that is not negative"
    return ""


def _double(values: Sequence[Any]) -> Any:
    """The first value that occurs twice, or None."""
    return next((value for place, value in enumerate(values) if value in values[:place]), None)


def planned_runs(study: Study) -> list[PlannedRun]:
    """All runs: seed by seed through all methods, so that a study broken off compares what it has fairly."""
    table = study.study
    blocks = [(start, seed) for start in table.cold_starts for seed in start.seeds or table.seeds]
    return [_run(study, entry, start, seed) for start, seed in blocks for entry in study.method]


def _run(study: Study, entry: MethodEntry, start: ColdStart, seed: int) -> PlannedRun:
    own = {
        "method": entry.trainer_name,
        "method_options": entry.options,
        "model": start.model,
        "seed": seed,
    }
    config = merge(merge(study.train, entry.train), own)
    for key in ("max_env_steps", "max_tokens"):
        if limit := getattr(study.study, key):
            config[key] = limit
    return PlannedRun(id=f"{entry.name}+{start.name}+{seed}", method=entry, cold_start=start, seed=seed, config=config)


def select(runs: Iterable[PlannedRun], only: Sequence[str]) -> list[PlannedRun]:
    """The runs of some methods; of all where none is named.

    Raises:
        UsageError: for a method that is not in the study.
    """
    every = list(runs)
    names = list(dict.fromkeys(run.method.name for run in every))
    for name in only:
        if name not in names:
            raise choices("method of this study", name, names)
    return [run for run in every if not only or run.method.name in only]


def check_settings(runs: Iterable[PlannedRun]) -> None:
    """Refuses settings, methods and options that the trainer does not know, before anything is run.

    Raises:
        UsageError: naming the method of the study.
    """
    checked: set[str] = set()
    for run in runs:
        if run.method.name not in checked:
            checked.add(run.method.name)
            try:
                make_train_config(run.config)
                make_method(run.method.trainer_name, run.config["method_options"])
            except UsageError as error:
                raise UsageError(f"method {run.method.name!r} of the study: {error}") from error


def model_digest(folder: Path) -> str:
    """Digest of the files in a model's folder, by name and content.

    Raises:
        DataError: if there is no such folder, or it is empty.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    if not files:
        raise DataError(folder, "holds no model", "Make the cold start first, or correct its `model` in the study file")
    total = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


def model_digests(runs: Iterable[PlannedRun], *, needed: bool = True) -> dict[str, str | None]:
    """Digest of each model that runs read, by its folder.

    Args:
        runs: as planned.
        needed: raise where a model is absent, instead of None for it.

    Raises:
        DataError: see `needed`.
    """
    models = dict.fromkeys(model for run in runs for model in run.models)
    return {model: model_digest(Path(model)) if needed or Path(model).is_dir() else None for model in models}
