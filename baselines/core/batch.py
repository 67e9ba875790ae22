"""Micro-batches by token budget: samples of like length side by side, or packed end to end into rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.baselines.core.losses import LossTerm, Weights
from agentgym.baselines.core.sample import Sample

OVERHEAD = 64  # tokens that a forward and backward of a small model cost beside their tokens
FIELDS = ("behaviour_logp", "advantage", "pg_weight", "ce_weight", "kl_weight")


@dataclass  # no slots: hooks of DeepSpeed look into its __dict__
class Outputs:
    """What a model says about the selected tokens.

    Attributes:
        logp: (N,) log-probabilities at the sampling temperature, with gradient.
        entropy: (N,) of the next-token distributions, with gradient.
        value: (N,) of the value head, or None.
        logits: (N, vocabulary), divided by the temperature.
    """

    logp: Tensor
    entropy: Tensor
    value: Tensor | None
    logits: Tensor


@dataclass(slots=True)
class Report:
    """Sums that metrics are made of."""

    value: Tensor | float = 0.0
    weight: Tensor | float = 0.0


@dataclass(slots=True, eq=False)
class Batch:
    """A micro-batch: rows of tokens, and its selected tokens flattened to (N,).

    Attributes:
        samples: what it holds, in order.
        input_ids, position_ids: (rows, width).
        attention_mask: None where rows hold one sample and padding stands behind; else (rows, 1, width, width) bool.
        places: (N,) index into the flattened rows of the token BEFORE each selected one, which predicts it.
        tokens: (N,) ids of the selected tokens.
        sample_of, turn_of: (N,) index into `samples`, and turn.
        fields: (N,) float tensors by name; `batch[name]`.
        weights: (N,) by loss term.
        padding: share of the rows that is padding.
        reports: sums for metrics.
    """

    samples: list[Sample]
    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    places: Tensor
    tokens: Tensor
    sample_of: Tensor
    turn_of: Tensor
    fields: dict[str, Tensor]
    weights: dict[str, Tensor]
    padding: float
    reports: dict[str, Report] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def report(self, name: str, value: Tensor, weight: Tensor) -> None:
        """Adds to a metric that is the sum of `value` over the sum of `weight`."""
        report = self.reports.setdefault(name, Report())
        report.value = report.value + value.detach().sum()
        report.weight = report.weight + weight.detach().sum()

    def mean_within(self, values: Tensor, level: str) -> Tensor:
        """The mean of (N,) values over the policy-gradient tokens of each sample or turn, at each of its tokens."""
        if not len(values):  # no token has weight
            return values
        key = self.sample_of if level == "sequence" else self.sample_of * (int(self.turn_of.max()) + 1) + self.turn_of
        _, index = torch.unique(key, return_inverse=True)
        weight = (self["pg_weight"] > 0).to(values.dtype)
        size = int(index.max()) + 1
        zeros = torch.zeros(size, dtype=values.dtype, device=values.device)
        total = zeros.index_add(0, index, values * weight)
        count = zeros.index_add(0, index, weight).clamp(min=1)
        return (total / count)[index]


def cut(
    samples: Sequence[Sample], token_budget: int, overhead: int = OVERHEAD, *, packed: bool = False
) -> list[list[Sample]]:
    """Groups samples of like length into micro-batches, at the least cost in padding and number of micro-batches.

    Args:
        samples: any lengths. Those of one unit stay together.
        token_budget: most tokens of a micro-batch, padding included; a longer sample (or unit) is alone.
        overhead: what one more micro-batch costs, in tokens.
        packed: rows hold several samples, so that lengths may be mixed; where there are no units to keep together.

    Returns:
        Micro-batches; of rows with one sample each, those with short ones first.
    """
    if packed and samples and not any(sample.unit for sample in samples):
        width = max(map(len, samples))
        rows_of = pack(samples, width)
        step = max(1, token_budget // width)
        chunks = [rows_of[start : start + step] for start in range(0, len(rows_of), step)]
        return [[samples[index] for row in chunk for index in row] for chunk in chunks]
    units: dict[str, list[Sample]] = {}
    for number, sample in enumerate(samples):
        units.setdefault(sample.unit or f"\0{number}", []).append(sample)
    order = sorted(units.values(), key=lambda unit: max(map(len, unit)))
    widths = [max(map(len, unit)) for unit in order]
    rows = [0]
    for unit in order:
        rows.append(rows[-1] + len(unit))
    # best[end]: least cost of the first `end` units, and where the last micro-batch of that begins
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(order) + 1):
        options = []
        for start in range(end - 1, -1, -1):
            tokens = (rows[end] - rows[start]) * widths[end - 1]
            if tokens > token_budget and start < end - 1:
                break
            options.append((best[start][0] + tokens + overhead, start))
        best.append(min(options))
    parts: list[list[Sample]] = []
    end = len(order)
    while end:
        start = best[end][1]
        parts.append([sample for unit in order[start:end] for sample in unit])
        end = start
    return parts[::-1]


def pack(samples: Sequence[Sample], width: int) -> list[list[int]]:
    """First-fit decreasing: rows of sample indices whose lengths sum to at most `width`."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(samples)), key=lambda index: -len(samples[index])):
        size = len(samples[index])
        for row, left in enumerate(room):
            if size <= left:
                rows[row].append(index)
                room[row] -= size
                break
        else:
            rows.append([index])
            room.append(max(width, size) - size)
    return rows


def normalisers(samples: Sequence[Sample], terms: Sequence[LossTerm]) -> dict[str, dict[int, NDArray[np.float32]]]:
    """Weights of each term over a whole mini-batch, by id of the sample."""
    found: dict[str, dict[int, NDArray[np.float32]]] = {}
    for term in terms:
        weights: Weights = term.weights(samples)
        found[term.name] = {id(sample): weight for sample, weight in zip(samples, weights, strict=True)}
    return found


def make_batch(
    samples: Sequence[Sample],
    weights: Mapping[str, Mapping[int, NDArray[np.float32]]],
    *,
    device: torch.device | str = "cpu",
    packed: bool = False,
    everything: bool = False,
) -> Batch:
    """Tensors of a micro-batch.

    Args:
        samples: at least one.
        weights: from `normalisers`.
        device: where the tensors go.
        packed: several samples a row, kept apart by the attention mask.
        everything: select every token but the first of each sample, not only those with weight in some term.
    """
    longest = max(map(len, samples))
    rows = pack(samples, longest) if packed else [[index] for index in range(len(samples))]
    shape = (len(rows), longest)
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    segment = np.zeros(shape, np.int32)
    places: list[NDArray[np.int64]] = []
    chosen: list[tuple[int, NDArray[np.int64]]] = []
    for row, members in enumerate(rows):
        start = 0
        for index in members:
            sample = samples[index]
            size = len(sample)
            ids[row, start : start + size] = sample.input_ids
            positions[row, start : start + size] = np.arange(size)
            segment[row, start : start + size] = index + 1
            if everything:
                own = np.arange(1, size)
            else:
                used = np.zeros(size, np.bool_)
                for by_sample in weights.values():
                    used |= by_sample[id(sample)] != 0
                used[:1] = False
                own = np.flatnonzero(used)
            places.append(row * longest + start + own - 1)
            chosen.append((index, own))
            start += size
    mask = None
    if packed and len(rows) < len(samples):
        seg = torch.from_numpy(segment).to(device)
        same = (seg[:, :, None] == seg[:, None, :]).tril()
        mask = (same | torch.eye(longest, dtype=torch.bool, device=same.device))[:, None]

    def flat(pick: Any) -> Tensor:
        parts = [pick(samples[index])[own] for index, own in chosen]
        return torch.from_numpy(np.concatenate(parts)).to(device)

    names = {name for sample in samples for name in sample.fields}
    fields = {name: flat(lambda sample, name=name: getattr(sample, name)) for name in FIELDS}
    fields |= {name: flat(lambda sample, name=name: sample.fields[name]) for name in sorted(names)}
    return Batch(
        samples=list(samples),
        input_ids=torch.from_numpy(ids).to(device),
        position_ids=torch.from_numpy(positions).to(device),
        attention_mask=mask,
        places=torch.from_numpy(np.concatenate(places)).to(device),
        tokens=flat(lambda sample: sample.input_ids).long(),
        sample_of=torch.from_numpy(np.concatenate([np.full(len(own), index, np.int64) for index, own in chosen])).to(
            device
        ),
        turn_of=flat(lambda sample: sample.turn_of).long(),
        fields=fields,
        weights={name: flat(lambda sample, by=by: by[id(sample)]) for name, by in weights.items()},
        padding=1.0 - sum(map(len, samples)) / ids.size,
    )


def read_tokens(
    parts: Sequence[Sequence[Sample]],
    read: Callable[[Batch], Tensor],
    *,
    device: torch.device | str,
    packed: bool = False,
) -> dict[int, NDArray[np.float32]]:
    """What a model says about every token of samples, without gradient.

    Args:
        parts: micro-batches.
        read: batch -> (N,) numbers.
        device, packed: see `make_batch`.

    Returns:
        id of each sample -> (T,) numbers, 0 at place 0.
    """
    found: dict[int, NDArray[np.float32]] = {}
    with torch.no_grad():
        for part in parts:
            batch = make_batch(part, {}, device=device, packed=packed, everything=True)
            flat = read(batch).float().cpu().numpy()
            owner = batch.sample_of.cpu().numpy()
            for index, sample in enumerate(part):
                found[id(sample)] = np.zeros(len(sample), np.float32)
                found[id(sample)][1:] = flat[owner == index]
    return found
