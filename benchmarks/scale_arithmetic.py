"""Memory and time of training 1.5B, 7B and 32B models on 1, 8 and 64 GPUs, by arithmetic: nothing here was measured.

    python -m benchmarks.scale_arithmetic

prints the tables of docs/guides/scale.md, where the formulas are explained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

GIB = 2**30
GPU_MEMORY = 80e9  # bytes; H100 SXM, by its data sheet, as the next two
GPU_FLOPS = 989e12  # bf16, dense
GPU_BANDWIDTH = 3.35e12  # bytes/s
NODE_LINK, CLUSTER_LINK = 450e9, 50e9  # bytes/s each way of a GPU: NVLink, and 400 Gbit/s between machines
GPUS_A_NODE = 8
COMPUTE_SHARE = 0.4  # assumed share of the peak that is reached
BANDWIDTH_SHARE = 0.5
HEADROOM = 0.9  # of the memory; the rest is for the allocator, NCCL and CUDA itself

TOKEN_BUDGET = 16_384  # one forward of a process
LOGITS = 4 * 2**25 * 3  # bytes; as many logits as are computed at once, with softmax and gradient
LORA_RANK = 32

SLOTS = 128  # most episodes at once in a process
EPISODES = 1024  # of an iteration: 128 tasks in groups of 8
TURNS, READ, WRITTEN = 30, 100, 50  # tokens read and written a turn
LENGTH = TURNS * (READ + WRITTEN)


@dataclass(frozen=True)
class Shape:
    """A decoder: hidden size, layers, heads, heads of keys and values, size of a head, feed-forward, vocabulary."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    feed_forward: int
    vocabulary: int
    tied: bool

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer, with the biases of queries, keys and values."""
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys + queries + 2 * keys
        return attention + 3 * self.hidden * self.feed_forward + 2 * self.hidden

    @property
    def embeddings(self) -> int:
        """Parameters of embedding and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.embeddings + self.layers * self.layer_parameters + self.hidden

    @property
    def adapters(self) -> int:
        """Parameters of LoRA on all linear layers but the head."""
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        ends = 2 * (self.hidden + queries) + 2 * (self.hidden + keys) + 3 * (self.hidden + self.feed_forward)
        return LORA_RANK * self.layers * ends

    @property
    def cache(self) -> int:
        """Bytes of keys and values a token, in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head

    @property
    def layer_activations(self) -> int:
        """Bytes a token that the backward of one layer needs, in bf16."""
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        return 2 * (4 * self.hidden + 2 * queries + 2 * keys + 4 * self.feed_forward)

    @property
    def activations(self) -> int:
        """Bytes of a forward of TOKEN_BUDGET tokens with gradient checkpointing."""
        return TOKEN_BUDGET * (2 * self.hidden * self.layers + self.layer_activations) + LOGITS


MODELS = (
    Shape("1.5B", 1536, 28, 12, 2, 128, 8960, 151_936, True),  # of Qwen2.5
    Shape("7B", 3584, 28, 28, 4, 128, 18_944, 152_064, False),
    Shape("32B", 5120, 64, 40, 8, 128, 27_648, 152_064, False),
)
COUNTS = (1, 8, 64)


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    Attributes:
        state: weights, gradients and optimiser, always there.
        passes: forward and backward.
        step: the optimiser's step, for a moment.
        sampling: in the same process.
    """

    state: float
    passes: float
    step: float
    sampling: float

    @property
    def total(self) -> float:
        """Passes, step and sampling take turns."""
        return self.state + max(self.passes, self.step, self.sampling)

    @property
    def fits(self) -> bool:
        """Whether a GPU has that much."""
        return self.total <= HEADROOM * GPU_MEMORY


def memory(shape: Shape, gpus: int, way: str) -> Memory:
    """Memory a GPU.

    Args:
        shape: of the model.
        gpus: how many train.
        way: one of WAYS; with a server nothing is sampled in the process.
    """
    size, spread = shape.parameters, gpus if "FSDP2" in way else 1
    cache = 0 if "server" in way else min(SLOTS, -(-EPISODES // gpus)) * LENGTH * shape.cache
    trained = shape.adapters if "LoRA" in way else size
    frozen = 2 * size if "LoRA" in way else 0
    passes = shape.activations
    sampling = cache
    if "FSDP2" in way:
        # Whole for a while: embedding and head, and two layers, in bf16, with gradients in fp32 where they are trained.
        whole = shape.embeddings + 2 * shape.layer_parameters
        passes += whole * (2 if "LoRA" in way else 6)
        sampling += 0 if "server" in way else 2 * size
    elif "LoRA" not in way:
        passes += 2 * size  # autocast's bf16 copy of the fp32 weights, also while sampling
        sampling += 0 if "server" in way else 2 * size
    return Memory((frozen + 16 * trained) / spread, passes, 4 * trained / spread, sampling)


def update_seconds(shape: Shape, gpus: int, *, sharded: bool) -> tuple[float, float]:
    """Seconds of one pass over an iteration's tokens: computing, and sending what is spread."""
    tokens = EPISODES * LENGTH / gpus
    computing = 8 * shape.parameters * tokens / (COMPUTE_SHARE * GPU_FLOPS)
    if gpus == 1:
        return computing, 0.0
    link = NODE_LINK if gpus <= GPUS_A_NODE else CLUSTER_LINK
    passes = max(1.0, tokens / TOKEN_BUDGET) if sharded else 1.0
    return computing, passes * 8 * shape.parameters * (gpus - 1) / gpus / link


def sampling_seconds(shape: Shape, gpus: int) -> tuple[float, float, int]:
    """Seconds of an iteration's rollouts without the environments, new tokens a second of a GPU, episodes at once."""
    split = 1
    while 2 * shape.parameters / split > 0.6 * GPU_MEMORY and split < gpus:
        split *= 2  # tensor parallel, until there is room for the cache
    room = HEADROOM * GPU_MEMORY * split - 2 * shape.parameters
    groups = max(1, gpus // split)
    fits = int(room / (LENGTH * shape.cache))
    if fits < 1:
        return float("inf"), 0.0, 0
    at_once = min(fits, -(-EPISODES // groups), 256)
    step = (2 * shape.parameters + at_once * LENGTH / 2 * shape.cache) / (BANDWIDTH_SHARE * GPU_BANDWIDTH * split)
    rounds = -(-EPISODES // (groups * at_once))
    reading = 2 * shape.parameters * EPISODES * TURNS * READ / groups / (COMPUTE_SHARE * GPU_FLOPS * split)
    return rounds * TURNS * WRITTEN * step + reading, at_once / step / split, at_once


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size < 100 * GIB else f"{size / GIB:.0f}"


def shapes_table() -> str:
    head = (
        "Model",
        "Parameters",
        "Weights in bf16, GiB",
        "Full training state, GiB",
        f"LoRA-{LORA_RANK} parameters, M",
        "Cache a token, KiB",
        f"Cache of {LENGTH} tokens, GiB",
        f"Activations of {TOKEN_BUDGET} tokens, GiB",
    )
    rows = [
        (
            shape.name,
            f"{shape.parameters / 1e9:.2f} G",
            gib(2 * shape.parameters),
            gib(16 * shape.parameters),
            f"{shape.adapters / 1e6:.0f}",
            f"{shape.cache / 1024:.0f}",
            f"{LENGTH * shape.cache / GIB:.2f}",
            gib(shape.activations),
        )
        for shape in MODELS
    ]
    return markdown(head, rows)


WAYS = (
    "LoRA, DDP",
    "LoRA, DDP, server",
    "LoRA, FSDP2",
    "full, DDP",
    "full, DDP, server",
    "full, FSDP2",
    "full, FSDP2, server",
)


def memory_table() -> str:
    head = ("Model", "Way", *(f"{count} GPU{'s' * (count > 1)}" for count in COUNTS))
    rows = []
    for shape in MODELS:
        for way in WAYS:
            cells = []
            for count in COUNTS:
                need = memory(shape, count, way)
                cells.append(f"{gib(need.total)}{'' if need.fits else ' (too much)'}")
            rows.append((shape.name, way, *cells))
    return markdown(head, rows)


def time_table() -> str:
    head = (
        "Model",
        "GPUs",
        "Sampling, s",
        "New tokens/s a GPU",
        "Episodes at once a copy",
        "Computing the update, s",
        "Sending, DDP, s",
        "Sending, FSDP2, s",
    )
    rows = []
    for shape in MODELS:
        for count in COUNTS:
            seconds, rate, at_once = sampling_seconds(shape, count)
            computing, ddp = update_seconds(shape, count, sharded=False)
            _, sharded = update_seconds(shape, count, sharded=True)
            played = (f"{seconds:.0f}", f"{rate:.0f}", at_once) if at_once else ("-", "-", 0)
            rows.append((shape.name, count, *played, f"{computing:.0f}", f"{ddp:.2f}", f"{sharded:.1f}"))
    return markdown(head, rows)


def main() -> None:
    for title, made in (
        ("Sizes", shapes_table),
        ("Memory a GPU, GiB", memory_table),
        ("Time an iteration", time_table),
    ):
        print(f"{title}\n\n{made()}\n")


if __name__ == "__main__":
    main()
