"""Playing ahead: iteration i is trained on what iteration i - k's policy played, in a fixed and recorded way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.baselines.conftest import lines_of
from tests.shared_data import need

need("torch")

Make = Callable[..., Any]


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_staleness_is_bounded_and_recorded(staleness: int, small: Make, tmp_path: Path) -> None:
    from agentgym.baselines.core.trainer import train

    train(small(iterations=5, staleness=staleness), tmp_path / "run")
    lines = [line for line in lines_of(tmp_path / "run") if line["kind"] == "train"]
    assert [line["staleness_max"] for line in lines] == [min(i, staleness) for i in range(5)]
    assert all(line["staleness"] == line["staleness_max"] for line in lines)


def test_it_is_reproducible_and_begins_like_a_run_that_waits(small: Make, tmp_path: Path) -> None:
    from agentgym.baselines.core.trainer import train

    for name, staleness in (("one", 1), ("two", 1), ("waits", 0)):
        train(small(iterations=3, staleness=staleness), tmp_path / name)
    one, two, waits = (lines_of(tmp_path / name) for name in ("one", "two", "waits"))
    assert one == two
    assert one[0]["loss/policy"] == waits[0]["loss/policy"]
    assert one[1] != waits[1]
