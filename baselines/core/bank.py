"""Copies of the policy's parameters: a reference, a moving average, a proximal or a stale policy.

Only trained parameters are copied; a copy is used by putting its values in place of the policy's for a while.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentgym.baselines.core.method import Copy
from agentgym.errors import choices

Values = dict[str, Tensor]


class Bank:
    """The copies of one model.

    Args:
        parameters: the trained parameters, by name.
        rules: name of each copy -> its rule.
        folder: where copies on disk lie.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], rules: Mapping[str, Copy], folder: Path) -> None:
        self._parameters = dict(parameters)
        self._rules = dict(rules)
        self._folder = folder
        self._values: dict[str, Values] = {}
        self.refreshed: dict[str, int] = {}
        for name in rules:
            self.refresh(name, 0)

    def refresh(self, name: str, version: int) -> None:
        """Sets a copy to the policy as it is, which has seen `version` iterations."""
        self._store(name, {key: value.detach().clone() for key, value in self._parameters.items()})
        self.refreshed[name] = version

    def after_step(self) -> None:
        """Moves the averages; called behind each optimiser step."""
        for name, rule in self._rules.items():
            if rule.decay is not None:
                values = self._load(name)
                for key, parameter in self._parameters.items():
                    values[key].lerp_(parameter.detach().to(values[key]), 1 - rule.decay)
                self._store(name, values)

    def after_iteration(self, version: int) -> None:
        """Refreshes the copies whose time has come; `version` iterations are done."""
        for name, rule in self._rules.items():
            if rule.every and rule.decay is None and version % rule.every == 0:
                self.refresh(name, version)

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Puts a copy in the policy's place.

        Raises:
            UsageError: if there is no such copy.
        """
        if name not in self._rules:
            raise choices("copy of the policy", name, list(self._rules))
        own = {key: parameter.data for key, parameter in self._parameters.items()}
        values = self._load(name)
        try:
            for key, parameter in self._parameters.items():
                parameter.data = values[key].to(parameter.device)
            yield
        finally:
            for key, parameter in self._parameters.items():
                parameter.data = own[key]

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"values": {name: self._load(name) for name in self._rules}, "refreshed": self.refreshed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` gave."""
        for name, values in state["values"].items():
            self._store(name, dict(values))
        self.refreshed = dict(state["refreshed"])

    def _store(self, name: str, values: Values) -> None:
        if self._rules[name].on_disk:
            self._folder.mkdir(parents=True, exist_ok=True)
            part = self._folder / f"{name}.part"
            save_file({key: value.contiguous() for key, value in values.items()}, part)
            part.replace(self._folder / f"{name}.safetensors")
        else:
            self._values[name] = values

    def _load(self, name: str) -> Values:
        if self._rules[name].on_disk:
            values: Values = load_file(self._folder / f"{name}.safetensors")
            return values
        return self._values[name]
