"""What is kept of a run: one small JSON file that is committed, made from the trainer's metrics.jsonl."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agentgym.baselines.study.plan import PlannedRun
from agentgym.episode import write_atomically
from agentgym.errors import DataError

METRICS = "metrics.jsonl"
FORMAT = 1
_REMOVE = "Remove it, and the study makes the run again"
Record = TypeVar("Record")


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampled evaluations on held-out tasks in order, one entry each.

    Attributes:
        iteration: after which it was made; 0 is the cold start.
        env_steps, tokens, seconds: spent until then, without evaluations where the trainer counts them apart.
        success: share of the episodes won.
        episodes: number of episodes.
    """

    iteration: tuple[int, ...]
    env_steps: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    success: tuple[float, ...]
    episodes: tuple[int, ...]


class Final(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last evaluation in one mode of decoding.

    Attributes:
        success: share of the episodes won.
        episodes: number of episodes.
        turns: mean number of turns.
        invalid: share of the turns whose action was invalid.
        outcome: mean return.
        entropy: of the policy: the mean -log p of the tokens it sampled.
        tokens: generated tokens an episode.
        by_kind: (won, all) of each kind of task.
    """

    success: float
    episodes: int
    turns: float
    invalid: float | None = None
    outcome: float | None = None
    entropy: float | None = None
    tokens: float | None = None
    by_kind: dict[str, tuple[int, int]] = {}


class Totals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run did and used.

    Attributes:
        iterations: done; fewer than planned where the budget ended the run.
        env_steps: steps of the environment.
        tokens: generated.
        scored_tokens: gone through in extra scoring passes (reference, teacher, values).
        trained_tokens: gone through in updates.
        seconds: of the trainer.
        episodes, faults: played, and lost to a fault.
        groups, silent_groups: groups of episodes, and those without any signal.
    """

    iterations: int
    env_steps: int = 0
    tokens: int = 0
    scored_tokens: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    episodes: int = 0
    faults: int = 0
    groups: int = 0
    silent_groups: int = 0


class RunSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The summary of one finished run.

    Attributes:
        format: of this file.
        id, method, label, seed, cold_start: as in the study file.
        card: how a table must call the method, from its card: where its formulas come from.
        model_digests: of the model from which the run started, and of the teacher's where there is one.
        code: digest of the trainer's source when the run was started, or last continued; see `code_digest`.
        settings: of the trainer, and `settings_digest` their digest.
        curve: success on held-out tasks.
        sampled, greedy: the final evaluations.
        trained_entropy: of the policy in the updates, mean over the iterations up to the last evaluation; None for
            methods that do not measure it.
        totals: see `Totals`.
    """

    id: str
    method: str
    label: str
    card: str
    seed: int
    cold_start: str
    model_digests: tuple[str, ...]
    code: str
    settings: dict[str, Any]
    settings_digest: str
    curve: Curve
    sampled: Final
    greedy: Final
    trained_entropy: float | None
    totals: Totals
    format: int = FORMAT


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that was cut off by a kill is left out.

    Raises:
        DataError: if the file cannot be read, or another line is no JSON object.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            path, f"cannot be read ({error.strerror})", "Run the study again: it continues the run"
        ) from error
    *lines, rest = data.split(b"\n")
    rows = []
    for number, line in enumerate([*lines, rest], 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number <= len(lines):
            raise DataError(path, f"line {number} is no JSON object", "Remove the folder of the run and run it again")
    return rows


def summarise(run: PlannedRun, folder: Path, *, digests: Mapping[str, str | None], code: str) -> RunSummary:
    """The summary of a finished run.

    Args:
        run: as planned.
        folder: of the trainer, with its metrics.jsonl.
        digests: of the models by folder, see `agentgym.baselines.study.plan.model_digests`.
        code: see `code_digest`.

    Raises:
        DataError: if the metrics lack an evaluation that a finished run has.
    """
    path = folder / METRICS
    rows = read_metrics(path)
    evals = list(_evaluations(rows))
    sampled = [row for row in evals if row["mode"] == "sampled"]
    greedy = [row for row in evals if row["mode"] == "greedy"]
    trains = list({row["iteration"]: row for row in rows if row.get("kind") == "train"}.values())
    if len(sampled) < 2 or not greedy or sampled[-1]["iteration"] != greedy[-1]["iteration"]:
        raise DataError(
            path, "lacks the evaluations of a finished run, sampled and greedy", "Run the study again to finish the run"
        )
    recent = trains[-run.evaluated_every :]
    return RunSummary(
        id=run.id,
        method=run.method.name,
        label=run.method.shown,
        card=_card_label(run),
        seed=run.seed,
        cold_start=run.cold_start.name,
        model_digests=tuple(digests[model] or "" for model in run.models),
        code=code,
        settings=run.settings,
        settings_digest=run.digest,
        curve=Curve(
            iteration=tuple(int(row["iteration"]) for row in sampled),
            env_steps=tuple(int(row["env_steps"]) for row in sampled),
            tokens=tuple(int(row["tokens"]) for row in sampled),
            seconds=tuple(round(row["seconds"], 1) for row in sampled),
            success=tuple(round(row["success"], 4) for row in sampled),
            episodes=tuple(int(row["episodes"]) for row in sampled),
        ),
        sampled=_final(sampled[-1]),
        greedy=_final(greedy[-1]),
        trained_entropy=_mean(recent, "entropy"),
        totals=_totals(trains, sampled[-1]),
    )


def _evaluations(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One evaluation an iteration and mode, in order: the one of most episodes, of equal ones the last."""
    best: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        if row.get("kind") == "eval" and "success" in row:  # else every episode was lost
            key = (row["iteration"], row["mode"])
            if key not in best or row["episodes"] >= best[key]["episodes"]:
                best[key] = row
    return (best[key] for key in sorted(best))


def _final(row: dict[str, Any]) -> Final:
    return Final(
        success=round(row["success"], 4),
        episodes=row["episodes"],
        turns=round(row["turns"], 2),
        invalid=_rounded(row.get("invalid")),
        outcome=_rounded(row.get("outcome")),
        entropy=_rounded(row.get("surprise")),
        tokens=_rounded(row.get("tokens_per_episode"), 1),
        by_kind={kind: (won, number) for kind, (won, number) in row.get("by_kind", {}).items()},
    )


def _totals(trains: Sequence[dict[str, Any]], last: dict[str, Any]) -> Totals:
    end = trains[-1] if trains else last

    def total(key: str) -> int:
        return int(sum(row.get(key, 0) for row in trains))

    return Totals(
        iterations=int(last["iteration"]),
        env_steps=int(end["env_steps"]),
        tokens=int(end["tokens"]),
        scored_tokens=int(end.get("scored_tokens", 0)),
        trained_tokens=int(end.get("trained_tokens", 0)),
        seconds=round(max(end["seconds"], last["seconds"]), 1),
        episodes=int(end.get("episodes_played", total("episodes"))),
        faults=total("faults"),
        groups=total("groups"),
        silent_groups=total("silent_groups"),
    )


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return round(sum(values) / len(values), 4) if values else None


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


def _card_label(run: PlannedRun) -> str:
    from agentgym.baselines.core.method import find_method

    return find_method(run.method.trainer_name).card.label


def code_digest() -> str:
    """Short digest of the trainer and of the methods of this package, so that a report can say if it has changed."""
    total = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted([*(root / "core").rglob("*.py"), *(root / "methods").rglob("*.py")]):
        total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def summary_path(folder: Path, run_id: str) -> Path:
    """Where the summary of a run lies below the results of its study."""
    return folder / "runs" / f"{run_id}.json"


def write_summary(folder: Path, summary: RunSummary) -> Path:
    """Writes a summary, one field a line so that a changed one is readable in a diff."""
    path = summary_path(folder, summary.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = msgspec.to_builtins(summary)
    lines = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items()]
    write_atomically(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    return path


def read_record(path: Path, kind: type[Record], what: str) -> Record:
    """Reads one JSON file of a run.

    Args:
        path: of the file.
        kind: what it must hold.
        what: that is in words.

    Raises:
        DataError: if it cannot be read or holds something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(path, f"is no {what} ({error})", _REMOVE) from error


def _damage(summary: RunSummary, run: PlannedRun) -> str:
    """What is wrong with a summary whose fields have the right types, or ""."""
    named = (summary.id, summary.method, summary.cold_start, summary.seed)
    if named != (run.id, run.method.name, run.cold_start.name, run.seed):
        return f"it is that of {summary.id!r}: method {named[1]!r}, cold start {named[2]!r}, seed {named[3]}"
    if summary.format != FORMAT:
        return f"its format is {summary.format}, not {FORMAT}"
    curve = summary.curve
    lengths = {name: len(getattr(curve, name)) for name in curve.__struct_fields__}
    if len(set(lengths.values())) > 1:
        return "its curve has unequal columns: " + ", ".join(f"{name} {length}" for name, length in lengths.items())
    if len(curve.iteration) < 2:
        return "its curve has fewer than two evaluations"
    if any(after <= before for before, after in itertools.pairwise(curve.iteration)):
        return "the iterations of its curve do not increase"
    if any(after < before for before, after in itertools.pairwise(curve.env_steps)):
        return "the environment steps of its curve decrease"
    if not all(0 <= rate <= 1 for rate in (*curve.success, summary.sampled.success, summary.greedy.success)):
        return "it has a success outside of 0 to 1"
    return ""


def read_summary(folder: Path, run: PlannedRun, digests: Mapping[str, str | None] | None = None) -> RunSummary | None:
    """The summary of a planned run, or None if it has not been made.

    Args:
        folder: of the study's results.
        run: as planned.
        digests: of the models by folder; those that are absent are not compared.

    Raises:
        DataError: if it is no summary, or one of a run with other settings or other models.
    """
    path = summary_path(folder, run.id)
    if not path.exists():
        return None
    summary = read_record(path, RunSummary, "summary of a run")
    if problem := _damage(summary, run):
        raise DataError(path, f"is no summary of a run ({problem})", _REMOVE)
    mend = "Give the study another name, restore what it was made with, or remove the summary to run it anew"
    if summary.settings_digest != run.digest:
        raise DataError(path, f"was made with other settings: {_differences(summary.settings, run.settings)}", mend)
    for model, before in zip(run.models, summary.model_digests, strict=False):
        if (digests or {}).get(model) not in (None, before):
            raise DataError(path, f"was made with another model than the one that now lies in {model}", mend)
    return summary


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The settings that differ, as "lr was 0.001 and is 0.0004"."""
    old, new = _flat(old), _flat(new)
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    shown = [f"{key} was {old.get(key, 'unset')} and is {new.get(key, 'unset')}" for key in keys[:4]]
    return "; ".join(shown + (["..."] if len(keys) > 4 else [])) or "the digest differs though the settings agree"


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
