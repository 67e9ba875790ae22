"""Every method has a card, numbers that survive a round trip, and clear errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.losses import LossTerm
from agentgym.baselines.core.method import Config, Method, find_method, list_methods, make_method
from agentgym.errors import UsageError

METHODS = list_methods()
PAGES = Path(__file__).resolve().parents[2] / "docs" / "methods"
NEEDED: dict[str, dict[str, Any]] = {}  # options without which a method cannot be made


def test_the_classic_methods_are_there() -> None:
    classic = "dapo dpo dr_grpo gigpo grpo gspo hgpo opd opsd ppo react reflexion reinforce_pp rft rloo sft"
    assert set(classic.split()) <= set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_card_says_where_the_formulas_come_from(name: str) -> None:
    kind = find_method(name)
    card = kind.card
    assert card.name == name
    assert all((card.title, card.paper, card.source, card.result, card.families, card.hooks))
    assert msgspec.convert(msgspec.to_builtins(card), Card) == card
    assert ("inspired by" in card.label) == (max(card.grade.split("/")) in ("C", "D"))
    if card.label == "inspired by":
        assert "inspired by" in (kind.__doc__ or "").lower()
    assert "card" in vars(kind), "a subclass must not inherit the card of another method"


@pytest.mark.parametrize("name", METHODS)
def test_numbers_survive_a_round_trip(name: str) -> None:
    method = make_method(name, NEEDED.get(name))
    config = method.config
    assert isinstance(config, Config)
    assert msgspec.convert(msgspec.to_builtins(config), type(config)) == config
    assert make_method(name, msgspec.to_builtins(config)).config == config


@pytest.mark.parametrize("name", METHODS)
def test_every_number_is_explained(name: str) -> None:
    own = vars(find_method(name).Config).get("__annotations__", {})
    for field in own:
        documented = "".join(kind.__doc__ or "" for kind in find_method(name).Config.__mro__)
        assert field in documented, f"{field} of {name} is not in a docstring"


@pytest.mark.parametrize("name", METHODS)
def test_presets_load(name: str) -> None:
    for preset in getattr(find_method(name), "PRESETS", {}):
        assert isinstance(make_method(name, {"preset": preset}), Method)


@pytest.mark.parametrize("name", METHODS)
def test_wrong_options_are_refused_with_a_hint(name: str) -> None:
    with pytest.raises(UsageError, match=r"Did you mean 'group_size'"):
        make_method(name, {"group_sise": 4})
    with pytest.raises(UsageError, match="group_size"):
        make_method(name, {"group_size": "many"})
    with pytest.raises(UsageError, match="unknown preset"):
        make_method(name, {"preset": "no such preset"})


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_trains_has_loss_terms_of_different_names(name: str) -> None:
    method = make_method(name, NEEDED.get(name))
    if method.trains:
        terms = method.losses()
        assert terms
        assert all(isinstance(term, LossTerm) for term in terms)
        assert len({term.name for term in terms}) == len(terms)


@pytest.mark.parametrize("name", METHODS)
def test_a_page_tells_numbers_grade_and_status(name: str) -> None:
    card = find_method(name).card
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert f"agentgym train --method {name}" in page
    assert card.label in page
    assert "result not run at paper scale" in page or "not run" not in card.result
    assert f"]({name}.md)" in (PAGES / "README.md").read_text(encoding="utf-8")
    for field in find_method(name).Config.__struct_fields__:
        if field not in Config.__struct_fields__:
            assert f"`{field}`" in page, f"docs/methods/{name}.md does not tell {field}"
    for field in msgspec.structs.fields(find_method(name).Config):
        if isinstance(field.default, int | float) and f"| `{field.name}` |" in page:
            shown = str(field.default).lower() if isinstance(field.default, bool) else f"{field.default:g}"
            assert f"| `{field.name}` | {shown} |" in page, f"docs/methods/{name}.md has another {field.name}"


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        ("grpo", "group_size", 0),
        ("grpo", "epochs", 0),
        ("grpo", "clip_low", -0.1),
        ("grpo", "clip_high", float("nan")),
        ("grpo", "kl_coefficient", "inf"),
        ("grpo", "ddof", 2),
        ("grpo", "max_length", 0),
        ("gigpo", "gamma", 1.1),
        ("gigpo", "similarity", -1),
        ("hgpo", "history_length", -1),
        ("dapo", "generation_batches", 0),
        ("ppo", "lam", 2),
        ("ppo", "value_clip", 0),
        ("dpo", "beta", 0),
        ("opsd", "mix", 1.5),
        ("reflexion", "max_trials", 0),
    ],
)
def test_a_number_out_of_its_range_is_refused_by_name(method: str, option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=option):
        make_method(method, {option: value})


def test_every_number_of_every_method_has_a_range() -> None:
    for name in METHODS:
        for field in msgspec.inspect.type_info(find_method(name).Config).fields:  # type: ignore[attr-defined]
            kinds = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
            for kind in kinds:
                if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
                    assert kind.ge is not None or kind.gt is not None, f"{field.name} of {name} has no lower bound"


@pytest.mark.parametrize("name", METHODS)
def test_no_float_option_may_be_infinite_or_no_number(name: str) -> None:
    for field in msgspec.structs.fields(find_method(name).Config):
        if isinstance(field.default, float):
            for value in (float("nan"), float("inf")):
                with pytest.raises(UsageError, match=field.name):
                    make_method(name, {field.name: value})


def test_an_unknown_average_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"Did you mean 'token-mean'"):
        make_method("grpo", {"aggregation": "token-men"})


def test_methods_need_no_torch_until_they_train() -> None:
    code = (
        "import sys\n"
        "from agentgym.baselines.core.method import list_methods, make_method\n"
        "for name in list_methods():\n"
        "    make_method(name).losses()\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_method_is_refused_with_a_hint() -> None:
    with pytest.raises(UsageError, match="Did you mean"):
        find_method("grpoo")
    assert find_method("Dr-GRPO") is find_method("dr_grpo")


def test_opsd_with_a_text_needs_the_text() -> None:
    with pytest.raises(UsageError, match='--option text="'):
        make_method("opsd", {"source": "text"})
