"""Bridge to TRL: whole episodes for `GRPOTrainer`, and finished runs as rows for `SFTTrainer` and `DPOTrainer`.

    trainer = GRPOTrainer(
        model,
        reward_funcs=reward_from_env,
        args=GRPOConfig(...),
        train_dataset=task_dataset("alfworld"),
        rollout_func=make_rollout_func("alfworld"),
        processing_class=tokenizer,
    )

A prompt of the data set names a task, nothing more: what the model is asked comes from the environment. `rollout_func`
is an experimental feature of TRL (written for 1.16); this package's own trainers do not need it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from agentgym.env import AgentEnv
from agentgym.episode import Episode, RunConfig, Turn, final_episodes, read_config, read_episodes, write_atomically
from agentgym.errors import UsageError, require_extra
from agentgym.evaluate import plan
from agentgym.policies._chat import Message, read_options
from agentgym.policies.hf import HFOptions, HFPolicy
from agentgym.prompts import Exchange, PromptConfig, render
from agentgym.registry import find_env, make_env
from agentgym.rollout import EpisodeSpec, rollout
from agentgym.task import canonical_json
from agentgym.workers import Backend, SerialBackend

Row = dict[str, Any]
RolloutFunc = Callable[[list[Any], Any], dict[str, list[Any]]]

# Set elsewhere: the first three by GRPOConfig, so that sampling and training agree; the last two by the model itself.
_NOT_HERE = ("temperature", "top_p", "top_k", "device", "dtype")


class Trajectory(NamedTuple):
    """An episode as one sequence of tokens.

    Attributes:
        prompt_ids: the first prompt.
        completion_ids: everything behind it: answers exactly as sampled, and what was shown between them.
        logprobs: one an id of `completion_ids`, as sampled; 0 where the model did not write.
        mask: 1 where the model wrote, else 0.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    mask: list[int]


def trajectory(episode: Episode) -> Trajectory:
    """The tokens of an episode, put together from its log.

    What follows a prompt that outgrew the model's context is left out, for it is no continuation.

    Args:
        episode: played by a policy that records tokens; its arrays are loaded.

    Raises:
        UsageError: if there are several roles, or a prompt does not extend the one before (windows, templates that
            rewrite earlier turns).
    """
    _one_role(episode)
    result = Trajectory([], [], [], [])
    for turn in episode.turns:
        if "completion_ids" not in turn.arrays:
            break
        prompt, completion = turn.arrays["prompt_ids"].tolist(), turn.arrays["completion_ids"].tolist()
        if turn.kept_ids != len(result.prompt_ids) + len(result.completion_ids):
            raise UsageError(
                f"{episode.episode_id}: a prompt does not extend the one before, so the episode is not one sequence; "
                'use template="chat" without a window, and a chat template that shows answers as they are'
            )
        if result.completion_ids:
            result.completion_ids.extend(prompt)
            result.logprobs.extend([0.0] * len(prompt))
            result.mask.extend([0] * len(prompt))
        else:
            result.prompt_ids.extend(prompt)
        result.completion_ids.extend(completion)
        result.logprobs.extend(turn.arrays["logprobs"].tolist())
        result.mask.extend([1] * len(completion))
    return result


def _one_role(episode: Episode) -> None:
    roles = {turn.role for turn in episode.turns}
    if len(roles) > 1:
        raise UsageError(
            f"{episode.episode_id} has the roles {sorted(roles)}; GRPOTrainer trains one policy's turns only"
        )


def make_rollout_func(
    env: str,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    max_new_tokens: int = 256,
    seed: int = 0,
    retries: int = 1,
    backend: Backend | None = None,
    on_episode: Callable[[Episode], None] | None = None,
    **options: Any,
) -> RolloutFunc:
    """A `rollout_func` for `GRPOTrainer`: plays one whole episode for each prompt with the trainer's model.

    Each completion is all that followed the first prompt; `env_mask` keeps what the environment said out of the
    loss. An episode that broke by no fault of the model has an empty mask and the reward None, which TRL leaves out
    of its group. Temperature, top_p, top_k and chat_template_kwargs are those of GRPOConfig; its
    max_completion_length limits nothing here (it remains the divisor of the loss "dr_grpo"): max_context does.
    vLLM generation, and FSDP, are not used or supported; DDP and DeepSpeed are.

    Args:
        env: id or family name of a registered environment with one role.
        env_kwargs: options of the environment.
        max_new_tokens: longest answer of one turn, in tokens.
        seed: seed of every reset, so that all episodes of a task begin alike.
        retries: times a faulted episode is tried again.
        backend: where the environments live; None for this thread. Not closed.
        on_episode: told every attempt when it ends, to log it.
        **options: more options of `HFOptions`, such as max_context, stop and batch_size.

    Returns:
        A function of (prompts, trainer). Beside what TRL asks for, its lists hold for each prompt: env_mask;
        env_reward, env_outcome, env_score, env_turns, env_valid (the share of valid actions), env_overflow (the
        context was full) and episode_id, which reward functions receive by name.

    Raises:
        UsageError: for an unknown environment or option, or an option that is not set here.
    """
    card = find_env(env)
    for name in _NOT_HERE:
        if name in options:
            raise UsageError(f"{name} is not set here: sampling follows GRPOConfig, and the model is the trainer's")
    base = read_options(HFOptions, "hf", {"max_new_tokens": max_new_tokens, **options})
    if base.template != "chat" or base.window is not None:
        raise UsageError('one sequence an episode needs template="chat" and no window, which are the defaults')
    played = 0

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        nonlocal played
        specs = _specs([_task_of(prompt) for prompt in prompts], trainer, seed, played)
        played += len(prompts)
        episodes: dict[str, Episode] = {}
        with _sampler(trainer, base) as policy, contextlib.ExitStack() as stack:
            slots = stack.enter_context(contextlib.closing(SerialBackend(len(specs)))) if backend is None else backend
            attempts = rollout(specs, card.id, policy, env_kwargs=env_kwargs, backend=slots, retries=retries)
            for episode in stack.enter_context(contextlib.closing(attempts)):
                episodes[episode.episode_id] = episode  # the last attempt stays
                if on_episode is not None:
                    on_episode(episode)
        return _columns([episodes[spec.episode_id] for spec in specs], _filler(trainer))

    return rollout_func


def _specs(tasks: Sequence[str], trainer: Any, seed: int, played: int) -> list[EpisodeSpec]:
    """One episode a prompt, with draws of its own in every group, step, process and seed of the trainer."""
    accelerator, state = trainer.accelerator, trainer.state
    first = (trainer.args.seed % 2**31) << 32
    return [
        EpisodeSpec(
            task_id=task,
            seed=seed,
            repeat=first + (played + index) * accelerator.num_processes + accelerator.process_index,
            group=f"step {state.global_step} {task}",
        )
        for index, task in enumerate(tasks)
    ]


def _task_of(prompt: Any) -> str:
    """The task that a prompt names: a text, or a conversation whose last message is that text."""
    name = prompt[-1].get("content") if isinstance(prompt, list) and prompt else prompt
    if not isinstance(name, str):
        raise UsageError(f"a prompt must be a task's id, as task_dataset makes them, not {prompt!r:.100}")
    return name


@contextlib.contextmanager
def _sampler(trainer: Any, base: HFOptions) -> Iterator[HFPolicy]:
    """The trainer's model as a policy that samples as GRPOConfig says."""
    args = trainer.args
    if args.min_p or args.repetition_penalty not in (None, 1.0):
        raise UsageError("min_p and repetition_penalty of GRPOConfig are not supported here; leave them out")
    options = msgspec.structs.replace(
        base,
        temperature=args.temperature,
        top_p=None if args.top_p in (None, 1.0) else args.top_p,
        top_k=args.top_k or None,
        template_options={**(args.chat_template_kwargs or {}), **base.template_options},
    )
    unwrap = require_extra("trl.models", extra="trl").unwrap_model_for_generation
    how = {
        "gather_deepspeed3_params": args.ds3_gather_for_generation,
        "gradient_checkpointing_kwargs": args.gradient_checkpointing_kwargs,
    }
    with unwrap(trainer.model_wrapped, trainer.accelerator, **how) as model:
        policy = HFPolicy(model, _tokenizer(trainer), options)
        policy.version = trainer.state.global_step
        yield policy


def _tokenizer(trainer: Any) -> Any:
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def _filler(trainer: Any) -> int:
    """A token that stands where an episode has none, outside every mask."""
    tokenizer = _tokenizer(trainer)
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def _columns(episodes: Sequence[Episode], filler: int) -> dict[str, list[Any]]:
    """What `GRPOTrainer` takes, one entry an episode in each list."""
    columns: dict[str, list[Any]] = {}
    for episode in episodes:
        tokens = trajectory(episode)
        if not tokens.completion_ids:
            tokens = Trajectory([filler], [filler], [0.0], [0])
        turns = episode.turns
        row = {
            "prompt_ids": tokens.prompt_ids,
            "completion_ids": tokens.completion_ids,
            "logprobs": tokens.logprobs,
            "env_mask": tokens.mask if episode.finished else [0] * len(tokens.mask),
            "env_reward": episode.total_reward,
            "env_outcome": episode.outcome,
            "env_score": episode.score,
            "env_turns": len(turns),
            "env_valid": sum(turn.valid for turn in turns) / len(turns) if turns else 0.0,
            "env_overflow": any("context_overflow" in turn.usage for turn in turns),
            "episode_id": episode.episode_id,
        }
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def reward_from_env(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    env_reward: Sequence[float | None],
    env_outcome: Sequence[str] = (),
    env_turns: Sequence[int] = (),
    env_overflow: Sequence[bool] = (),
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Reward function of `GRPOTrainer`: the sum of the environment's rewards, None for an episode that broke.

    Logs env/success, env/fault, env/turns and env/overflow where TRL offers `log_metric`.
    """
    if log_metric is not None:
        finished = [outcome == "success" for outcome in env_outcome if outcome != "fault"]
        metrics = {
            "env/success": finished,
            "env/fault": [outcome == "fault" for outcome in env_outcome],
            "env/turns": env_turns,
            "env/overflow": env_overflow,
        }
        for name, values in metrics.items():
            if values:
                log_metric(name, sum(values) / len(values))
    return list(env_reward)


def task_rows(
    env: str, *, env_kwargs: Mapping[str, Any] | None = None, split: str = "train", limit: int | None = None
) -> list[Row]:
    """The tasks of a split as rows {"prompt": id, "task_id": id}.

    Args:
        env: id or family name.
        env_kwargs: options of the environment.
        split: which tasks.
        limit: only the first ones; None for the whole split.

    Raises:
        UsageError: for an unknown environment or split, or a limit above the split's size.
    """
    return [
        {"prompt": task, "task_id": task}
        for task in plan(env, env_kwargs=env_kwargs, split=split, episodes=limit).tasks
    ]


def task_dataset(
    env: str, *, env_kwargs: Mapping[str, Any] | None = None, split: str = "train", limit: int | None = None
) -> Any:
    """`task_rows` as a `datasets.Dataset`, which is what `GRPOTrainer` takes."""
    datasets = require_extra("datasets", extra="trl")
    return datasets.Dataset.from_list(task_rows(env, env_kwargs=env_kwargs, split=split, limit=limit))


def succeeded(episode: Episode) -> bool:
    """Whether an episode ended in success."""
    return episode.outcome == "success"


def sft_rows(
    run: Path | str,
    *,
    per_turn: bool = False,
    keep: Callable[[Episode], bool] = succeeded,
    prompt: PromptConfig | None = None,
) -> Iterator[Row]:
    """Episodes of a run directory as conversations to imitate, in TRL's formats.

    Args:
        run: run directory; its policy may be anything, an expert as well as a model.
        per_turn: one row a turn, {"prompt": messages, "completion": [answer]}, on whose answer alone SFTTrainer
            trains; otherwise one row an episode, {"messages": messages}, for a chat template that marks the
            assistant's part (assistant_only_loss=True), or for training on observations too.
        keep: which finished episodes.
        prompt: how prompts are made. None for those that the policy was given, where the log has them; others, and
            prompts that do not make one conversation where that is wanted, are made with the defaults.

    Yields:
        Rows that also hold task_id and episode_id.

    Raises:
        DataError: if the run directory is damaged.
        UsageError: if an episode has several roles.
    """
    with _Prompts(Path(run), prompt) as prompts:
        for episode in prompts.episodes(keep):
            names = {"task_id": episode.task_id, "episode_id": episode.episode_id}
            if per_turn:
                for turn, asked in zip(episode.turns, prompts.of(episode), strict=True):
                    yield {"prompt": asked, "completion": [_answer(turn)], **names}
            else:
                yield {"messages": prompts.conversation(episode)[1], **names}


def preference_rows(run: Path | str, *, margin: float = 0.0, prompt: PromptConfig | None = None) -> Iterator[Row]:
    """Pairs of episodes of the same task with the same first prompt, in TRL's preference format.

    The best episode is paired with the worst, the second best with the second worst, and so on while their rewards
    differ by more than `margin`; each episode is used once. DPOTrainer counts the observations within a
    trajectory as part of it.

    Args:
        run: run directory with several episodes a task (repeats).
        margin: least difference of total rewards, exclusive.
        prompt: as in `sft_rows`.

    Yields:
        {"prompt": messages, "chosen": messages, "rejected": messages} with task_id, chosen_id, rejected_id,
        chosen_reward and rejected_reward.

    Raises:
        DataError: if the run directory is damaged.
        UsageError: for a negative margin, or if an episode has several roles.
    """
    if not margin >= 0:
        raise UsageError(f"margin must be 0 or more, not {margin}")
    groups: dict[tuple[str, bytes], list[tuple[float, str, list[Message], list[Message]]]] = {}
    with _Prompts(Path(run), prompt) as prompts:
        for episode in prompts.episodes(lambda _: True):
            first, whole = prompts.conversation(episode)
            reward = episode.total_reward or 0.0
            group = groups.setdefault((episode.task_id, canonical_json(first)), [])
            group.append((reward, episode.episode_id, first, whole[len(first) :]))
    for (task_id, _), group in groups.items():
        ranked = sorted(group, key=lambda item: item[0])
        for worse, better in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            if better[0] - worse[0] <= margin:
                break
            yield {
                "prompt": better[2],
                "chosen": better[3],
                "rejected": worse[3],
                "task_id": task_id,
                "chosen_id": better[1],
                "rejected_id": worse[1],
                "chosen_reward": better[0],
                "rejected_reward": worse[0],
            }


def write_jsonl(path: Path | str, rows: Iterable[Row]) -> int:
    """Writes rows as lines of JSON, the whole file or none of it, and returns how many.

    Raises:
        DataError: if it cannot be written.
    """
    lines = [msgspec.json.encode(row) + b"\n" for row in rows]
    write_atomically(Path(path), b"".join(lines))
    return len(lines)


class _Prompts:
    """The prompts of a run's episodes, from the log or made anew; the environment is made when it is needed."""

    def __init__(self, run: Path, prompt: PromptConfig | None) -> None:
        self._run = run
        self._config: RunConfig = read_config(run)
        self._prompt = prompt
        self._env: AgentEnv | None = None

    def __enter__(self) -> _Prompts:
        return self

    def __exit__(self, *_: object) -> None:
        if self._env is not None:
            self._env.close()

    def episodes(self, keep: Callable[[Episode], bool]) -> Iterator[Episode]:
        """The finished episodes that have turns and are wanted."""
        for episode in final_episodes(read_episodes(self._run)):
            if episode.finished and episode.turns and keep(episode):
                _one_role(episode)
                yield episode

    def of(self, episode: Episode) -> list[list[Message]]:
        """The prompt of each turn."""
        if self._prompt is not None:
            return self._render(episode, self._prompt)
        return _logged(episode) or self._render(episode, PromptConfig())

    def conversation(self, episode: Episode) -> tuple[list[Message], list[Message]]:
        """The first prompt, and the whole episode as one conversation."""
        prompts = self.of(episode)
        if not _grows(episode, prompts):
            prompts = self._render(episode, PromptConfig())
        return prompts[0], [*prompts[-1], _answer(episode.turns[-1])]

    def _render(self, episode: Episode, config: PromptConfig) -> list[list[Message]]:
        if self._env is None:
            self._env = make_env(self._config.env, **self._config.env_kwargs)
        env = self._env
        env.reset(seed=episode.seed, options={"task": episode.task_id})
        history: list[Exchange] = []
        prompts = []
        for turn in episode.turns:
            asked = Exchange(turn.observation, turn.admissible)
            messages = render(
                config,
                system_prompt=env.system_prompt,
                task_instruction=env.instruction,
                history=[*history, asked],
                action_format=env.action_format,
                tools=env.tools,
                templates=env.prompt_templates,
            )
            prompts.append([dict(message) for message in messages])
            history.append(asked._replace(completion=turn.completion, action=turn.action or turn.completion))
        return prompts


def _logged(episode: Episode) -> list[list[Message]]:
    """The prompts that the policy was given; none where it was given no messages."""
    prompts: list[list[Message]] = []
    for turn in episode.turns:
        if turn.messages is None:
            return []
        prompts.append([*(prompts[-1][: turn.kept_messages] if prompts else []), *turn.messages])
    return prompts


def _answer(turn: Turn) -> Message:
    return {"role": "assistant", "content": turn.completion}


def _grows(episode: Episode, prompts: Sequence[list[Message]]) -> bool:
    """Whether each prompt goes on from the one before and its answer."""
    return all(
        after[: len(before) + 1] == [*before, _answer(turn)]
        for turn, before, after in zip(episode.turns, prompts, prompts[1:], strict=False)
    )
