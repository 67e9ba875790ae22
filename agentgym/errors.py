"""The error taxonomy. Every message says how to mend the problem.

Three kinds matter to the rest of the code: a bad call (`UsageError`), a bad file (`DataError`), and a world
that breaks by our doing (`InfrastructureError`), which never carries a reward. A bad *action* is no exception
at all: the observation says what was wrong.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import gymnasium


class AgentGymError(Exception):
    """Base of all errors raised on purpose by agentgym."""


class UsageError(AgentGymError, ValueError):
    """A call that cannot be carried out: unknown id, bad option, unknown task. The CLI exits with code 2."""


class StepOrderError(UsageError, gymnasium.error.ResetNeeded):
    """`step` before `reset`, or after the end of the episode."""


class MissingExtraError(UsageError, ImportError):
    """An optional package is needed that is not installed."""


class DataError(AgentGymError):
    """A file or folder that cannot be used. The CLI exits with code 2.

    Args:
        path: the offending file or folder.
        problem: what is wrong with it, without a final full stop.
        mend: what the reader can do about it.
    """

    def __init__(self, path: str | Path, problem: str, mend: str) -> None:
        super().__init__(path, problem, mend)
        self.path = str(path)
        self.problem = problem
        self.mend = mend

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}. {self.mend}"


class InfrastructureError(AgentGymError):
    """The world broke by our doing (retriever down, sandbox lost, disk full).

    The episode is recorded with outcome "fault", carries no reward, is left out of success rates and shown beside
    them, and may be retried.
    """


def require_extra(module: str, *, extra: str) -> ModuleType:
    """Imports an optional module, or says which extra brings it.

    Args:
        module: dotted module name.
        extra: name of the extra of the distribution that installs it.

    Raises:
        MissingExtraError: if the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{module} is needed for this and could not be imported ({error}). "
            f"Install it with: pip install 'agentgym-suite[{extra}]'"
        ) from error


def choices(kind: str, given: object, known: list[str] | tuple[str, ...]) -> UsageError:
    """An error for a name that is not one of the known ones, with the nearest ones first."""
    import difflib

    near = difflib.get_close_matches(str(given), known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    listed = ", ".join(map(repr, known[:20])) + (f", ... ({len(known)} in all)" if len(known) > 20 else "")
    return UsageError(f"unknown {kind} {given!r}. {hint}Known: {listed or 'none'}.")
