"""A key-value cache that lives as long as its episode, so that no token of a conversation is encoded twice.

Rows of one page stand side by side, each with its own length: the keys of row r at column c belong to its token c. What
padding writes behind a row's end is overwritten by the tokens that come there later, and never looked at before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

from agentgym.errors import require_extra
from agentgym.policies._generate import Completion, Row, choose

GROW = 128  # columns by which a page grows at least


def keeps_cache(model: Any) -> bool:
    """Whether this model's cache can be kept: plain attention over everything before, in every layer.

    Rows of one page begin at the same column but stand at different places, so the model must take its positions as
    they are given: those that count them from the mask (ALiBi) or carry a state are left out.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    if any(getattr(config, name, False) for name in ("is_encoder_decoder", "alibi")) or base._is_stateful:
        return False
    if "position_ids" not in inspect.signature(base.get_decoder().forward).parameters:
        return False
    layers = getattr(config, "layer_types", None)
    if layers is not None:
        return all(kind == "full_attention" for kind in layers)
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return not windowed


class CachedSampler:
    """Completes prompts, encoding only what their conversation has not seen yet.

    Args:
        model: a causal language model of transformers for which `keeps_cache` holds.
        rows: most conversations in one forward.
    """

    def __init__(self, model: Any, rows: int) -> None:
        self._model = model
        self._rows = rows
        self._pages: list[_Page] = []

    def generate(
        self,
        keys: Sequence[Hashable],
        rows: Sequence[Row],
        *,
        temperature: float,
        top_p: float | None = None,
        top_k: int | None = None,
        end_ids: Collection[int] = (),
        stopped: Callable[[Sequence[int]], bool] | None = None,
    ) -> list[Completion | Exception]:
        """Completes prompts; as `agentgym.policies._generate.generate`, with a key that names each conversation.

        Returns:
            One completion a row; an error concerns the rows of its own page only.
        """
        torch = require_extra("torch", extra="hf")
        done: list[Completion | Exception] = [Completion([], []) for _ in rows]
        training = self._model.training
        self._model.eval()
        try:
            with torch.inference_mode():
                for page, places in self._assign(keys):
                    answers: Sequence[Completion | Exception]
                    try:
                        answers = page.complete(
                            [keys[place] for place in places],
                            [rows[place] for place in places],
                            lambda logits, draws: choose(logits, draws, temperature, top_p, top_k),
                            end_ids,
                            stopped,
                        )
                    except Exception as error:
                        self._pages.remove(page)
                        answers = [error] * len(places)
                    for place, answer in zip(places, answers, strict=True):
                        done[place] = answer
        finally:
            self._model.train(training)
        return done

    def _assign(self, keys: Sequence[Hashable]) -> list[tuple[_Page, list[int]]]:
        """Which page completes which rows: the one that knows the conversation, or the first with room."""
        home = {key: page for page in self._pages for key in page.keys}
        asked = set(keys)
        members: dict[int, list[int]] = {id(page): [] for page in self._pages}
        fresh = []
        for place, key in enumerate(keys):
            page = home.get(key)
            if page is None:
                fresh.append(place)
            else:
                members[id(page)].append(place)
        for page in self._pages:
            if not page.live <= asked:  # it waits for others; beside them, new rows would have to be copied each time
                continue
            room = self._rows - len(members[id(page)])
            members[id(page)] += fresh[:room]
            fresh = fresh[room:]
        for start in range(0, len(fresh), self._rows):
            page = _Page(self._model)
            self._pages.append(page)
            members[id(page)] = fresh[start : start + self._rows]
        return [(page, members[id(page)]) for page in self._pages if members[id(page)]]

    def forget(self, key: Hashable) -> None:
        """Lets go of a conversation."""
        for page in self._pages:
            page.live.discard(key)
        self._pages = [page for page in self._pages if page.live]

    def clear(self) -> None:
        """Lets go of all: the weights have changed."""
        self._pages.clear()


class _Page:
    """Conversations that are completed together, with their cache."""

    def __init__(self, model: Any) -> None:
        self.keys: list[Hashable] = []
        self.live: set[Hashable] = set()
        self._seen: list[list[int]] = []  # tokens whose keys are in the cache
        self._cache = _Cache()
        self._model = model
        self._forward = last_logits(model)

    def complete(
        self,
        keys: list[Hashable],
        rows: list[Row],
        pick: Callable[[Any, Any], tuple[Any, Any]],
        end_ids: Collection[int],
        stopped: Callable[[Sequence[int]], bool] | None,
    ) -> list[Completion]:
        torch = require_extra("torch", extra="hf")
        waiting = self.live.difference(keys)
        idle = [key for key in self.keys if key in waiting]
        self._take(keys, rows, idle)
        seen = self._seen[: len(rows)]
        fed = [list(row.ids[len(before) :]) for row, before in zip(rows, seen, strict=True)]
        longest = max(map(len, fed))
        draws = max(len(row.draws) for row in rows)
        self._cache.reserve(len(rows), max(map(len, self._seen)) + longest + draws)
        device = self._model.device
        if idle:  # they stay behind the asked ones
            self._cache.narrow(torch.arange(len(rows), device=device))
        start = torch.tensor([len(before) for before in seen], device=device)
        ids = torch.tensor([part + [0] * (longest - len(part)) for part in fed], device=device)
        last = torch.tensor([len(part) - 1 for part in fed], device=device)
        # Padding and rows that have ended must not leave a model's table of positions.
        limit = torch.tensor([len(row.ids) + len(row.draws) - 1 for row in rows], device=device)
        logits = self._run(ids, start[:, None] + torch.arange(longest, device=device), limit, last)
        done = [Completion([], []) for _ in rows]
        length = torch.tensor([len(row.ids) for row in rows], device=device)  # tokens in the cache
        running = list(range(len(rows)))  # rows of the forward, in the order of the cache's active rows
        going = [True] * len(rows)
        for step in range(draws):
            given = [float(rows[row].draws[step]) if going[row] else 0.5 for row in running]
            tokens, logprobs = pick(logits, torch.tensor(given, dtype=torch.float64)[:, None])
            for row, token, logprob in zip(running, tokens.tolist(), logprobs.tolist(), strict=True):
                if going[row]:
                    answer = done[row]
                    answer.ids.append(token)
                    answer.logprobs.append(logprob)
                    full = step + 1 == len(rows[row].draws)
                    if full or token in end_ids or (stopped is not None and stopped(answer.ids)):
                        going[row] = False
            left = [place for place, row in enumerate(running) if going[row]]
            if not left:
                break
            if 2 * len(left) <= len(running):  # copying the rest costs less than dragging the ended rows along
                index = torch.tensor(left, device=device)
                self._cache.narrow(index)
                running = [running[place] for place in left]
                tokens, length, limit = tokens[index], length[index], limit[index]
            logits = self._run(tokens[:, None], length[:, None], limit, None)
            length = length + 1
        self._cache.widen()
        for row, answer in enumerate(done):
            self._seen[row] = [*rows[row].ids, *answer.ids[:-1]]  # the last one was sampled, not read
        return done

    def _take(self, keys: list[Hashable], rows: list[Row], idle: list[Hashable]) -> None:
        """Puts the cached rows into the order of the request, those that wait for their turn behind them.

        A row whose prompt is not continued starts afresh.
        """
        known = {key: place for place, key in enumerate(self.keys)}
        order: list[int | None] = []
        seen: list[list[int]] = []
        for key, row in zip(keys, rows, strict=True):
            place = known.get(key)
            before = self._seen[place] if place is not None else []
            if before and (len(before) >= len(row.ids) or list(row.ids[: len(before)]) != before):
                before = []
            order.append(place)
            seen.append(before)
        kept = [known[key] for key in idle]
        self._cache.select([*order, *kept], len(self.keys))
        self._seen = [*seen, *(self._seen[place] for place in kept)]
        self.keys, self.live = [*keys, *idle], {*keys, *idle}

    def _run(self, ids: Any, positions: Any, limit: Any, last: Any) -> Any:
        width = int(positions.max()) + 1
        columns = self._cache.torch.arange(width, device=ids.device)
        mask = (columns <= positions[:, :, None])[:, None]
        self._cache.begin(positions, width)
        return self._forward(ids, positions.minimum(limit[:, None]), mask, self._cache, last)


class _Cache:
    """What attention layers ask of a cache: `update` stores new keys and values and returns all of them."""

    is_compileable = False

    def __init__(self) -> None:
        self.torch = require_extra("torch", extra="hf")
        self._layers: list[list[Any]] = []  # keys and values, (rows, heads, columns, size) each
        self._whole: list[list[Any]] | None = None  # while `_layers` holds only some rows of it
        self._rows: Any = None
        self._positions: Any = None
        self._width = 0
        self._room = (0, 0)

    def reserve(self, rows: int, columns: int) -> None:
        self._room = (rows, columns)
        for layer in self._layers:
            for kind, tensor in enumerate(layer):
                have = tensor.shape
                if have[0] < rows or have[2] < columns:
                    wide = max(have[2], columns + GROW if have[2] < columns else 0)
                    grown = tensor.new_zeros(max(have[0], rows), have[1], wide, have[3])
                    grown[: have[0], :, : have[2]] = tensor
                    layer[kind] = grown

    def select(self, order: list[int | None], rows: int) -> None:
        """Reorders the rows; None stands for a new one."""
        if not self._layers or order == list(range(rows)):
            return
        index = self.torch.tensor([0 if place is None else place for place in order], device=self._layers[0][0].device)
        self._layers = [[tensor[index] for tensor in layer] for layer in self._layers]

    def begin(self, positions: Any, width: int) -> None:
        self._positions, self._width = positions, width

    def narrow(self, index: Any) -> None:
        """Goes on with some of the rows."""
        if self._whole is None:
            self._whole, self._rows = self._layers, index
        else:
            self._store()
            self._rows = self._rows[index]
        whole = self._whole
        self._layers = [[tensor[self._rows] for tensor in layer] for layer in whole]

    def widen(self) -> None:
        """Goes back to all rows."""
        if self._whole is not None:
            self._store()
            self._layers, self._whole = self._whole, None

    def _store(self) -> None:
        assert self._whole is not None
        for whole, part in zip(self._whole, self._layers, strict=True):
            for tensor, rows in zip(whole, part, strict=True):
                tensor[self._rows, :, : self._width] = rows[:, :, : self._width]

    def update(self, keys: Any, values: Any, layer: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Stores (rows, heads, new, size) keys and values; returns those of all columns in use."""
        if layer == len(self._layers):
            rows, columns = self._room
            shape = (rows, keys.shape[1], columns + GROW)
            self._layers.append([keys.new_zeros(*shape, keys.shape[3]), values.new_zeros(*shape, values.shape[3])])
        stored = self._layers[layer]
        index = self.torch.arange(len(keys), device=keys.device)[:, None]
        stored[0][index, :, self._positions] = keys.transpose(1, 2)
        stored[1][index, :, self._positions] = values.transpose(1, 2)
        return stored[0][:, :, : self._width], stored[1][:, :, : self._width]

    def get_seq_length(self, layer: int = 0) -> int:
        return self._width


def last_logits(model: Any) -> Callable[[Any, Any, Any, Any, Any], Any]:
    """A forward that gives the logits of one place a row.

    Returns:
        (ids, positions, mask, cache, last) -> (rows, vocabulary), `last` being the place of each row or None for the
        last one.
    """
    torch = require_extra("torch", extra="hf")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT hides the signature
    hidden_states, head = split_head(base)

    def forward(ids: Any, positions: Any, mask: Any, cache: Any, last: Any) -> Any:
        if base.config._attn_implementation != "sdpa":  # others add the mask to the scores
            least = torch.finfo(base.dtype).min
            mask = torch.zeros_like(mask, dtype=base.dtype).masked_fill(~mask, least)
        hidden = hidden_states(ids, position_ids=positions, attention_mask=mask, cache=cache)
        chosen = hidden[:, -1] if last is None else hidden[torch.arange(len(hidden), device=hidden.device), last]
        return head(chosen)

    return forward


def split_head(base: Any) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """The two halves of a causal language model: up to the last hidden states, and from there to logits.

    Models that do more than one linear layer behind their hidden states keep that: scaling and soft caps are applied.
    """
    decoder = base.get_decoder()
    output = base.get_output_embeddings()
    # The cache's argument was renamed within transformers 5.
    name = "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"
    config = base.config.get_text_config()
    scale = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    cap = getattr(config, "final_logit_softcapping", None)

    def hidden_states(ids: Any, *, position_ids: Any, attention_mask: Any, cache: Any = None) -> Any:
        given = {} if cache is None else {name: cache}
        return decoder(
            input_ids=ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=cache is not None,
            **given,
        ).last_hidden_state

    def head(hidden: Any) -> Any:
        logits = output(hidden)
        if scale is not None:
            logits = logits * scale
        if divisor is not None:
            logits = logits / divisor
        if cap is not None:
            logits = (logits / cap).tanh() * cap
        return logits

    return hidden_states, head
