"""The public conformance checker: does an environment keep the contract of `agentgym.env`?

    from agentgym.checker import check_agent_env
    check_agent_env(lambda: LockEnv(digits=3))      # raises ContractError listing every finding

On the command line: `agentgym check agentgym/ALFWorld-v0`. It is stricter than Gymnasium's own check, which it runs
too: it plants faults and strange actions, plays environments beside each other, and walks through snapshots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec

from agentgym import _checks, _state_checks
from agentgym._probe import Check, Subject, unwrap
from agentgym.env import AgentEnv
from agentgym.errors import AgentGymError, UsageError
from agentgym.registry import env_class, find_env, make_env

CHECKS: tuple[Check, ...] = (*_state_checks.CHECKS[:5], *_checks.CHECKS, *_state_checks.CHECKS[5:])
"""All checks in the order in which they run."""


class Finding(msgspec.Struct, frozen=True):
    """One breach of the contract.

    Attributes:
        check: name of the check.
        message: what was seen.
        mend: what the author of the environment can do.
    """

    check: str
    message: str
    mend: str


class Report(msgspec.Struct, kw_only=True):
    """What the checker found.

    Attributes:
        env: id or class of the environment.
        passed: (name, meaning) of the checks that passed.
        findings: the breaches, in order of the checks.
        skipped: (name, why) of the checks that had nothing to look at, or build on one that did not pass.
    """

    env: str
    passed: list[tuple[str, str]]
    findings: list[Finding]
    skipped: list[tuple[str, str]]


class ContractError(AgentGymError):
    """An environment breaks the contract; the message lists every finding.

    Attributes:
        report: the whole report.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        lines = [f"{self.report.env} breaks the contract in {len(self.report.findings)} places:"]
        lines += [f"- {each.check}: {each.message}. {each.mend}." for each in self.report.findings]
        return "\n".join(lines)


def check_agent_env(
    make: Callable[[], AgentEnv] | str,
    *,
    seed: int = 0,
    turns: int = 12,
    subprocess: bool = False,
    raise_on_failure: bool = True,
) -> Report:
    """Checks an environment against the whole contract.

    Args:
        make: makes a fresh environment at every call (a class, a function or a partial), or a registered id.
        seed: first seed of every play.
        turns: greatest number of turns of most plays.
        subprocess: compare with other processes under another PYTHONHASHSEED too, and restore a snapshot in one;
            `make` must then be picklable.
        raise_on_failure: raise when there are findings; otherwise only report them.

    Raises:
        ContractError: listing all findings.
        UsageError: for an unknown id or a `make` that makes no environment.
    """
    if turns < 1:
        raise UsageError(f"turns must be at least 1, not {turns}")
    name = make if isinstance(make, str) else ""
    if isinstance(make, str):
        make = _factory(make)
    env = make()
    try:
        bare = unwrap(env)
        cls, capabilities = type(bare), frozenset(bare.capabilities)
    except (AttributeError, TypeError) as error:
        raise UsageError(f"make() gives no AgentEnv ({error}); pass a function that makes one") from error
    finally:
        if hasattr(env, "close"):
            env.close()
    subject = Subject(make, seed=seed, turns=turns, subprocess=subprocess, capabilities=capabilities)
    report = Report(env=name or f"{cls.__module__}:{cls.__qualname__}", passed=[], findings=[], skipped=[])
    for each in CHECKS:
        _run(each, subject, report)
    if report.findings and raise_on_failure:
        raise ContractError(report)
    return report


def check_env_id(name: str, **kwargs: Any) -> Report:
    """Checks a registered environment, other processes included; findings are reported, not raised.

    Args:
        name: id or family name.
        **kwargs: options of the environment, over those that its card names for tests.

    Raises:
        UsageError: for an unknown id or option.
    """
    card = find_env(name)
    make = _factory(name, **kwargs)
    report = check_agent_env(make, subprocess=True, raise_on_failure=False)
    report.env = card.id
    return report


def _factory(name: str, **kwargs: Any) -> Callable[[], AgentEnv]:
    card = find_env(name)
    options = {**card.smoke, **kwargs}
    make_env(card.id, **options).close()  # names a wrong option clearly
    # A class, and not its id, can be sent to a process that has not imported the module that registers it.
    return functools.partial(env_class(card.id), **options)


def _run(each: Check, subject: Subject, report: Report) -> None:
    passed = {name for name, _ in report.passed}
    if lacking := [name for name in each.needs if name not in subject.capabilities]:
        report.skipped.append((each.name, f"the environment does not declare {', '.join(lacking)}"))
        return
    if each.elsewhere and not subject.subprocess:
        report.skipped.append((each.name, "asked for with subprocess=True"))
        return
    if missing := [name for name in each.after if name not in passed]:
        report.skipped.append((each.name, f"it builds on {', '.join(missing)}"))
        return
    before = len(report.findings)
    try:
        report.findings += [Finding(each.name, *problem) for problem in each.run(subject)]
    except Exception as error:
        report.findings.append(
            Finding(
                each.name,
                f"the environment raises {type(error).__name__} ({error!s:.200})",
                "Play it with the same seed and mend what raises; only a broken world may",
            )
        )
    if len(report.findings) == before:
        report.passed.append((each.name, each.meaning))
