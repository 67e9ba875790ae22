"""The bridge to TRL: whole episodes for GRPOTrainer, with exact tokens and masks; runs as rows for other trainers."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import tests.worlds
from agentgym.episode import Episode, final_episodes, read_episodes
from agentgym.errors import DataError, UsageError
from agentgym.evaluate import evaluate, plan
from agentgym.integrations.trl import (
    make_rollout_func,
    preference_rows,
    reward_from_env,
    sft_rows,
    task_dataset,
    task_rows,
    trajectory,
    write_jsonl,
)
from agentgym.policies.hf import HFOptions, HFPolicy
from agentgym.prompts import PromptConfig
from agentgym.rollout import EpisodeSpec, rollout
from tests.policies.tiny_model import make_model, make_tokenizer
from tests.shared_data import need

COUNT = "test/Count-v0"
ROOT = Path(__file__).resolve().parents[2]
# Marks the assistant's part, for SFTTrainer's loss.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_of(template: str = "chatml") -> Any:
    return copy.deepcopy(make_tokenizer(template))  # trainers change it


def play_run(folder: Path, policy: Any, *, episodes: int = 8, repeats: int = 1, max_turns: int = 6) -> Path:
    config = plan(COUNT, env_kwargs={"max_turns": max_turns}, episodes=episodes, repeats=repeats)
    evaluate(config, policy, folder, backend="serial")
    return folder


# Without TRL.


def test_importing_the_bridge_imports_no_heavy_package() -> None:
    code = (
        "import sys, agentgym.integrations.trl;"
        "print([m for m in ('torch', 'trl', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_rows_of_tasks_name_them() -> None:
    rows = task_rows(COUNT, split="test", limit=3)
    assert rows == [{"prompt": f"count/{i:04}", "task_id": f"count/{i:04}"} for i in range(3)]
    assert len(task_rows(COUNT, split="test")) == 40
    with pytest.raises(UsageError, match="40 tasks"):
        task_rows(COUNT, split="test", limit=41)


def test_a_trajectory_is_the_log_put_together() -> None:
    (episode,) = rollout([EpisodeSpec(task_id="count/0000")], COUNT, tests.worlds.TokenPolicy())
    assert len(episode.turns) == 3
    tokens = trajectory(episode)
    last = 2**31 - 1
    assert tokens.prompt_ids == [0, 1, 2, 3, 4]
    assert tokens.completion_ids == [0, last, 10, 11, 12, 13, 14, 1, last, 20, 21, 22, 23, 24, 2, last]
    assert tokens.mask == [1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1]
    assert [logprob for logprob, own in zip(tokens.logprobs, tokens.mask, strict=True) if not own] == [0.0] * 10
    assert [logprob for logprob, own in zip(tokens.logprobs, tokens.mask, strict=True) if own] == pytest.approx(
        [-0.5, 0.0, -0.5, -1e-7, -0.5, -2e-7]
    )


def test_an_episode_that_is_not_one_sequence_is_refused() -> None:
    (episode,) = rollout([EpisodeSpec(task_id="count/0000")], COUNT, tests.worlds.TokenPolicy())
    episode.turns[1].kept_ids = 0
    with pytest.raises(UsageError, match="does not extend"):
        trajectory(episode)
    episode.turns[1].role = "other"
    with pytest.raises(UsageError, match=r"roles \['agent', 'other'\]"):
        trajectory(episode)


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "device", "dtype"])
def test_what_the_trainer_decides_cannot_be_set(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is not set here"):
        make_rollout_func(COUNT, **{name: 1})


def test_wrong_options_are_refused_at_once() -> None:
    with pytest.raises(UsageError, match="max_contxt"):
        make_rollout_func(COUNT, max_contxt=5)
    with pytest.raises(UsageError, match="no window"):
        make_rollout_func(COUNT, window=2)
    with pytest.raises(UsageError, match="unknown environment"):
        make_rollout_func("test/Cuont-v0")


def test_the_reward_is_the_environments_and_its_numbers_are_logged() -> None:
    logged: dict[str, float] = {}
    rewards = reward_from_env(
        ["a", "b", "c"],
        ["", "", ""],
        env_reward=[1.0, None, 0.25],
        env_outcome=["success", "fault", "failure"],
        env_turns=[2, 1, 3],
        env_overflow=[False, False, True],
        log_metric=logged.__setitem__,
        task_id=["a", "b", "c"],
    )
    assert rewards == [1.0, None, 0.25]
    assert logged == {
        "env/success": 0.5,
        "env/fault": pytest.approx(1 / 3),
        "env/turns": 2.0,
        "env/overflow": pytest.approx(1 / 3),
    }


def test_a_model_free_runs_successes_become_conversations(tmp_path: Path) -> None:
    run = play_run(tmp_path / "run", tests.worlds.UpPolicy(noise=0.4), episodes=12)
    episodes = {e.episode_id: e for e in final_episodes(read_episodes(run)) if e.outcome == "success"}
    assert 0 < len(episodes) < 12
    rows = list(sft_rows(run))
    assert [row["episode_id"] for row in rows] == sorted(episodes)
    for row in rows:
        episode = episodes[row["episode_id"]]
        system, *talk = row["messages"]
        assert system["role"] == "system"
        assert [m["content"] for m in talk if m["role"] == "assistant"] == [t.completion for t in episode.turns]
        asked = [m["content"] for m in talk if m["role"] == "user"]
        assert asked == [t.observation + "\n\nAdmissible actions:\ndown\nup" for t in episode.turns]
        assert row["task_id"] == episode.task_id


def test_rows_a_turn_hold_each_prompt_and_its_answer(tmp_path: Path) -> None:
    run = play_run(tmp_path / "run", tests.worlds.UpPolicy(), episodes=2)
    config = PromptConfig(template="single", window=1, system="Count.", instructions=False)
    rows = list(sft_rows(run, per_turn=True, prompt=config))
    assert len(rows) == 6
    assert all(row["completion"] == [{"role": "assistant", "content": "up"}] for row in rows)
    assert [message["role"] for message in rows[4]["prompt"]] == ["system", "user"]
    assert rows[4]["prompt"][1]["content"].startswith("Task: Say 1.\nSteps taken so far: 1. The last 1:\n[1]")


def test_other_episodes_can_be_kept(tmp_path: Path) -> None:
    run = play_run(tmp_path / "run", tests.worlds.UpPolicy(noise=0.4), episodes=12)
    failed = {row["episode_id"] for row in sft_rows(run, keep=lambda e: e.outcome == "failure")}
    assert failed | {row["episode_id"] for row in sft_rows(run)} == {e.episode_id for e in read_episodes(run)}


def test_preferences_pair_the_best_with_the_worst_of_a_task(tmp_path: Path) -> None:
    # one task five times, each with its own number of steps down
    run = play_run(tmp_path / "run", tests.worlds.UpPolicy(noise=0.35), episodes=40, repeats=5, max_turns=5)
    episodes = {e.episode_id: e for e in read_episodes(run)}
    rows = list(preference_rows(run))
    assert rows
    used: list[str] = []
    for row in rows:
        chosen, rejected = episodes[row["chosen_id"]], episodes[row["rejected_id"]]
        used += [row["chosen_id"], row["rejected_id"]]
        assert chosen.task_id == rejected.task_id == row["task_id"]
        assert chosen.total_reward == row["chosen_reward"] > row["rejected_reward"] == rejected.total_reward
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        for side, episode in (("chosen", chosen), ("rejected", rejected)):
            said = [m["content"] for m in row[side] if m["role"] == "assistant"]
            assert said == [turn.completion for turn in episode.turns]
            assert row[side][0]["role"] == row[side][-1]["role"] == "assistant"
    assert len(set(used)) == len(used)
    for task in {e.task_id for e in episodes.values()}:
        rewards = sorted(e.total_reward or 0.0 for e in episodes.values() if e.task_id == task)
        wanted = sum(better > worse for worse, better in zip(rewards[:2], rewards[::-1], strict=False))
        assert sum(row["task_id"] == task for row in rows) == wanted
    assert not list(preference_rows(run, margin=100))
    with pytest.raises(UsageError, match="margin"):
        next(preference_rows(run, margin=-1))


def test_rows_are_written_as_lines_of_json(tmp_path: Path) -> None:
    run = play_run(tmp_path / "run", tests.worlds.UpPolicy(), episodes=3)
    path = tmp_path / "rows.jsonl"
    assert write_jsonl(path, sft_rows(run)) == 3
    assert [msgspec.json.decode(line) for line in path.read_bytes().splitlines()] == list(sft_rows(run))
    with pytest.raises(DataError, match="cannot be written"):
        write_jsonl(tmp_path / "none" / "rows.jsonl", [])


# With TRL.


@pytest.fixture
def trl() -> None:
    need("torch")
    need("trl")


def test_a_models_own_prompts_are_used(tmp_path: Path, trl: None) -> None:
    policy = HFPolicy(make_model(), tokenizer_of(), HFOptions(max_new_tokens=4, system="Logged."))
    run = play_run(tmp_path / "run", policy, episodes=2)
    rows = list(sft_rows(run, keep=lambda _: True))
    assert len(rows) == 2
    for row, episode in zip(rows, final_episodes(read_episodes(run)), strict=True):
        assert row["messages"][0]["content"].startswith("Logged.")
        assert [m["content"] for m in row["messages"] if m["role"] == "assistant"] == [
            turn.completion for turn in episode.turns
        ]


def test_windowed_prompts_become_one_conversation_only_anew(tmp_path: Path, trl: None) -> None:
    policy = HFPolicy(make_model(), tokenizer_of(), HFOptions(max_new_tokens=4, template="single"))
    run = play_run(tmp_path / "run", policy, episodes=1)
    (row,) = sft_rows(run, keep=lambda _: True)
    assert [m["role"] for m in row["messages"]] == ["system", *["user", "assistant"] * 6]
    turns = list(sft_rows(run, keep=lambda _: True, per_turn=True))
    assert len(turns) == 6
    assert all(len(turn["prompt"]) == 2 for turn in turns)
    assert "Steps taken so far: 5" in turns[5]["prompt"][1]["content"]


class Recorded:
    """A GRPOTrainer's batches and the episodes behind them."""

    def __init__(self, folder: Path, *, env: str = COUNT, rows: Any = None, steps: int = 2, **options: Any) -> None:
        from tests.integrations.trl_loss import make_trainer

        self.episodes: list[Episode] = []
        self.outputs: list[dict[str, Any]] = []
        self.rewards: list[list[float | None]] = []
        self.batches: list[dict[str, Any]] = []
        self.model = copy.deepcopy(make_model())
        func = make_rollout_func(
            env, env_kwargs={"max_turns": 3}, max_new_tokens=6, on_episode=self.episodes.append, **options
        )

        def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            assert len(prompts) == 4  # TRL repeats each prompt num_generations times itself
            self.outputs.append(func(prompts, trainer))
            return self.outputs[-1]

        def reward(**given: Any) -> list[float | None]:
            base = reward_from_env(**given)  # and something that differs, for a gradient
            self.rewards.append(base)
            return [None if r is None else r + sum(i) % 7 for r, i in zip(base, given["completion_ids"], strict=True)]

        self.trainer = make_trainer(
            self.model,
            tokenizer_of(),
            str(folder),
            rows=task_dataset(env, split="test", limit=8) if rows is None else rows,
            rollout_func=rollout_func,
            reward_funcs=reward,
            max_steps=steps,
            per_device_train_batch_size=4,
            num_generations=2,
            learning_rate=1e-2,
        )
        original = self.trainer._compute_loss

        def compute(model: Any, inputs: dict[str, Any]) -> Any:
            self.batches.append(inputs)
            return original(model, inputs)

        self.trainer._compute_loss = compute

    def train(self) -> Recorded:
        self.trainer.train()
        return self


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    need("torch")
    need("trl")
    return Recorded(tmp_path_factory.mktemp("grpo")).train()


@pytest.mark.slow
def test_the_rollout_function_plays_one_episode_a_prompt(recorded: Recorded) -> None:
    assert len(recorded.outputs) == 2
    assert len(recorded.episodes) == len({e.episode_id for e in recorded.episodes}) == 8
    by_id = {e.episode_id: e for e in recorded.episodes}
    for output in recorded.outputs:
        played = [by_id[name] for name in output["episode_id"]]
        tasks = [e.task_id for e in played]
        assert tasks[0] == tasks[1] != tasks[2] == tasks[3]  # the groups
        assert all(len(values) == 4 for values in output.values())
        assert output["env_turns"] == [len(e.turns) for e in played]
        assert output["env_outcome"] == [e.outcome for e in played]
        first, second = played[:2]
        assert first.turns[0].observation == second.turns[0].observation
        assert [t.completion for t in first.turns] != [t.completion for t in second.turns]  # draws of their own
    assert [e.turns[0].policy_version for e in recorded.episodes] == [0] * 4 + [1] * 4


@pytest.mark.slow
def test_ids_are_as_sampled_and_the_mask_is_exact(recorded: Recorded) -> None:
    tokenizer = recorded.trainer.processing_class
    by_id = {e.episode_id: e for e in recorded.episodes}
    for output in recorded.outputs:
        for index, name in enumerate(output["episode_id"]):
            turns = by_id[name].turns
            completion, mask = np.array(output["completion_ids"][index]), np.array(output["env_mask"][index], bool)
            logprobs = np.array(output["logprobs"][index])
            own = np.concatenate([turn.arrays["completion_ids"] for turn in turns])
            shown = np.concatenate([turn.arrays["prompt_ids"] for turn in turns[1:]])
            assert output["prompt_ids"][index] == turns[0].arrays["prompt_ids"].tolist()
            assert completion[mask].tolist() == own.tolist()
            assert completion[~mask].tolist() == shown.tolist()
            assert len(completion) == len(mask) == len(logprobs)
            assert logprobs[mask] == pytest.approx(np.concatenate([turn.arrays["logprobs"] for turn in turns]))
            text = tokenizer.decode(output["prompt_ids"][index] + completion.tolist())
            assert [text.count(turn.observation) for turn in turns] == [1] * len(turns)
            hidden = tokenizer.decode(completion[~mask])
            assert all(turn.observation in hidden for turn in turns[1:])


@pytest.mark.slow
def test_rewards_are_the_episodes(recorded: Recorded) -> None:
    by_id = {e.episode_id: e for e in recorded.episodes}
    for output, rewards in zip(recorded.outputs, recorded.rewards, strict=True):
        assert rewards == output["env_reward"] == [by_id[name].total_reward for name in output["episode_id"]]
    lines = [line for line in recorded.trainer.state.log_history if "reward" in line]
    assert [line["env/turns"] for line in lines] == [3.0, 3.0]
    assert [line["env/fault"] for line in lines] == [0.0, 0.0]


@pytest.mark.slow
def test_the_trainer_learns_from_the_models_tokens_alone(recorded: Recorded) -> None:
    for output, batch in zip(recorded.outputs, recorded.batches, strict=True):
        trained = (batch["completion_mask"] * batch["tool_mask"]).sum(1).tolist()
        assert sorted(trained) == sorted(sum(mask) for mask in output["env_mask"])
        assert batch["num_items_in_batch"] == sum(sum(mask) for mask in output["env_mask"])
    grad_norms = [line["grad_norm"] for line in recorded.trainer.state.log_history if "grad_norm" in line]
    assert len(grad_norms) == 2
    assert max(grad_norms) > 0


@pytest.mark.slow
def test_the_trainers_log_probabilities_equal_the_samplers(tmp_path: Path, trl: None) -> None:
    import torch

    recorded = Recorded(tmp_path, steps=1)
    original = recorded.trainer._get_per_token_logps_and_entropies
    seen: list[Any] = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        seen.append(result[0].detach().clone())
        return result

    recorded.trainer._get_per_token_logps_and_entropies = spy
    recorded.train()
    (batch,), (logps,) = recorded.batches, seen
    own = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert own.sum() > 20
    torch.testing.assert_close(logps[own], batch["sampling_per_token_logps"][own], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_faulted_episode_teaches_nothing(tmp_path: Path, trl: None) -> None:
    from datasets import Dataset

    broken = "faulty/00"  # raises in reset
    recorded = Recorded(
        tmp_path,
        env="test/Faulty-v0",
        rows=Dataset.from_list([{"prompt": broken}, {"prompt": "faulty/00-ok"}]),
        steps=1,
    ).train()
    output = recorded.outputs[0]
    bad = [outcome == "fault" for outcome in output["env_outcome"]]
    assert sum(bad) == 2
    assert [reward is None for reward in output["env_reward"]] == bad
    assert [sum(mask) == 0 for mask in output["env_mask"]] == bad
    assert sum(e.outcome == "fault" for e in recorded.episodes) == 4  # each was tried twice
    batch = recorded.batches[0]
    assert sorted((batch["completion_mask"] * batch["tool_mask"]).sum(1).tolist())[:2] == [0, 0]
    assert (batch["advantages"] == 0).sum() >= 2
    assert recorded.trainer.state.log_history[0]["env/fault"] == 0.5


@pytest.mark.slow
def test_an_episode_that_outgrows_the_context_ends_where_it_did(tmp_path: Path, trl: None) -> None:
    recorded = Recorded(tmp_path, steps=1, max_context=160).train()
    output = recorded.outputs[0]
    assert any(output["env_overflow"])
    for name, ids, prompt, mask in zip(
        output["episode_id"], output["completion_ids"], output["prompt_ids"], output["env_mask"], strict=True
    ):
        episode = next(e for e in recorded.episodes if e.episode_id == name)
        sampled = [turn.arrays["completion_ids"].size for turn in episode.turns if turn.arrays]
        assert len(prompt) + len(ids) <= 160
        assert sum(mask) == sum(sampled)
        assert mask[-1] == 1


@pytest.mark.slow
def test_sampling_that_cannot_be_had_is_refused(tmp_path: Path, trl: None) -> None:
    recorded = Recorded(tmp_path)
    recorded.trainer.args.repetition_penalty = 1.2
    with pytest.raises(UsageError, match="repetition_penalty"):
        recorded.train()
    recorded.trainer.args.repetition_penalty = 1.0
    with pytest.raises(UsageError, match="task's id"):
        make_rollout_func(COUNT)([7], recorded.trainer)


@pytest.mark.slow
def test_a_lora_model_trains_too(tmp_path: Path, trl: None) -> None:
    import peft

    from tests.integrations.trl_loss import make_trainer

    model = peft.get_peft_model(copy.deepcopy(make_model()), peft.LoraConfig(r=2, task_type="CAUSAL_LM"))
    trainer = make_trainer(
        model,
        tokenizer_of(),
        str(tmp_path),
        rows=task_dataset(COUNT, split="test", limit=4),
        rollout_func=make_rollout_func(COUNT, env_kwargs={"max_turns": 2}, max_new_tokens=4),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        max_steps=1,
        per_device_train_batch_size=4,
        num_generations=4,
    )
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0


def trainer_options(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_length": 4096,
    }


@pytest.mark.slow
@pytest.mark.parametrize("per_turn", [False, True])
def test_sft_rows_train_the_answers(tmp_path: Path, trl: None, per_turn: bool) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    run = play_run(tmp_path / "run", tests.worlds.UpPolicy(), episodes=4)
    rows = Dataset.from_list(list(sft_rows(run, per_turn=per_turn)))
    args = SFTConfig(**trainer_options(tmp_path / "out"), assistant_only_loss=not per_turn)
    tokenizer = tokenizer_of(MARKED)
    trainer = SFTTrainer(copy.deepcopy(make_model()), args=args, train_dataset=rows, processing_class=tokenizer)
    for batch in trainer.get_train_dataloader():
        for labels in batch["labels"]:
            answers = tokenizer.decode(labels[labels != -100])
            assert answers.replace("\n", "") == "up<|im_end|>" * (1 if per_turn else 3)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0


@pytest.mark.slow
def test_preference_rows_train(tmp_path: Path, trl: None) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    run = play_run(tmp_path / "run", tests.worlds.UpPolicy(noise=0.35), episodes=20, repeats=4, max_turns=4)
    rows = list(preference_rows(run))
    assert len(rows) >= 4
    args = DPOConfig(**trainer_options(tmp_path / "out"))
    tokenizer = tokenizer_of()
    trainer = DPOTrainer(
        copy.deepcopy(make_model()),
        ref_model=copy.deepcopy(make_model()),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    example, row = trainer.train_dataset[0], rows[0]
    whole = tokenizer.apply_chat_template(row["prompt"] + row["chosen"], tokenize=False)
    assert tokenizer.decode(example["prompt_ids"] + example["chosen_ids"]).strip() == whole.strip()
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(np.log(2)), abs=1e-4)  # equals its reference


@pytest.mark.slow
def test_the_example_runs(trl: None) -> None:
    command = [sys.executable, "examples/trl_grpo.py", "--steps", "2", "--imitation-steps", "8"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(lines) == 2
