"""Weights pushed to a stand-in for vLLM: the order of requests, what the server ends up with, and every way to fail.

The stand-in runs the real worker class on a real small model; only the HTTP server and vLLM's loader are made up.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentgym.errors import DataError, InfrastructureError, UsageError
from agentgym.policies.vllm import VLLMOptions, VLLMPolicy
from tests.policies.fake_server import FakeServer, Handler, dies, gives, hangs, make_request, serve
from tests.policies.tiny_model import make_model, make_tokenizer
from tests.shared_data import need

need("torch")
if True:  # what follows needs it
    import torch
    from safetensors.torch import load_file

    from agentgym.baselines.core import weight_push
    from agentgym.baselines.core.vllm_worker import WeightWorker
    from agentgym.baselines.core.weight_push import WeightPush, merged_weights, save_weights, token_logprobs

PROBE = [5, 17, 3, 80, 41, 6]
ORDER = [
    "/pause?mode=wait",
    "/collective_rpc",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/resume",
    "/v1/completions",
]


def fresh(change: float = 0.0) -> Any:
    """The small model, moved away from where it was by `change`."""
    model = copy.deepcopy(make_model())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(change * torch.sin(torch.arange(parameter.numel())).view_as(parameter))
    return model


@pytest.fixture(scope="module", autouse=True)
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The first save of a model imports a good deal."""
    save_weights(fresh(), tmp_path_factory.mktemp("first"), 0)


class Served:
    """The model inside of the stand-in, with the one method of vLLM's models that the worker calls."""

    def __init__(self) -> None:
        self.lm = fresh()

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        own = dict(self.lm.named_parameters())
        seen = set()
        for name, value in weights:
            with torch.no_grad():
                own[name].copy_(value)
            seen.add(name)
        return seen

    def named_parameters(self) -> Any:
        return self.lm.named_parameters()

    def modules(self) -> Any:
        return self.lm.modules()


class OldRunner:
    """As in older releases: the model's own loading is all there is."""

    def __init__(self) -> None:
        self.model = Served()


class Runner(OldRunner):
    """As in newer releases: weights are in a layout of their own, and loading by hand would not reach them."""

    def get_model(self) -> Served:
        return self.model

    def reload_weights(self, weights_iterator: Any = None, weights_path: str | None = None) -> None:
        self.model.load_weights(weights_iterator)


class Worker(WeightWorker):
    """What vLLM makes of its worker and ours."""

    def __init__(self, runner: OldRunner) -> None:
        self.model_runner = runner

    def reload_weights(self, *args: Any, **options: Any) -> None:
        self.model_runner.reload_weights(*args, **options)


class FakeVLLM:
    """Answers as vLLM does; `faults` answer instead on their path, in turn.

    Args:
        workers: of tensor parallelism, each with a whole model here.
        runner: which vLLM.
        faults: path -> answers to give instead of the right one, None for the right one.
    """

    def __init__(self, workers: int = 1, runner: type[OldRunner] = Runner, **faults: Any) -> None:
        self.workers = [Worker(runner()) for _ in range(workers)]
        self.faults = {name: list(answers) for name, answers in faults.items()}
        self.resets: list[bool] = []

    def __call__(self, handler: Handler, body: Any) -> None:
        name = handler.path.split("?")[0].rpartition("/")[2]
        if self.faults.get(name) and (fault := self.faults[name].pop(0)) is not None:
            fault(handler, body)
            return
        handler.reply(getattr(self, name)(body or {}))

    def pause(self, body: Any) -> Any:
        return {"status": "paused"}

    def resume(self, body: Any) -> Any:
        return {"status": "resumed"}

    def collective_rpc(self, body: Any) -> Any:
        return {"results": [getattr(worker, body["method"])(**body["kwargs"]) for worker in self.workers]}

    def reset_prefix_cache(self, body: Any) -> Any:
        return {"success": self.resets.pop(0) if self.resets else True}

    def completions(self, body: Any) -> Any:
        ids = body["prompt"]
        logps = token_logprobs(self.lm, ids)
        places = [
            {str(token): {"logprob": logp, "rank": 1}, "1000": {"logprob": -9.0}}
            for token, logp in zip(ids[1:], logps, strict=True)
        ]
        choice = {"prompt_logprobs": [None, *places], "token_ids": [4], "logprobs": {"token_logprobs": [-1.0]}}
        return {"choices": [choice]}

    @property
    def lm(self) -> Any:
        return self.workers[0].model_runner.model.lm


@contextmanager
def pushing(
    folder: Path, vllm: Callable[[Handler, Any], None], **options: Any
) -> Iterator[tuple[WeightPush, FakeServer]]:
    with serve(vllm) as server:
        push = WeightPush(server.url, folder, "policy", **{"probe": PROBE, "backoff": 0.01, "timeout": 20, **options})
        try:
            yield push, server
        finally:
            push.close()


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("runner", [Runner, OldRunner])
def test_after_a_push_the_server_computes_what_the_trainer_does(runner: type[OldRunner], tmp_path: Path) -> None:
    vllm, model = FakeVLLM(runner=runner), fresh(0.1)
    before = copy.deepcopy(model)
    with pushing(tmp_path / "w", vllm) as (push, server):
        assert push.version is None
        assert not same(vllm.lm, model)
        pushed = push.push(model, 1)
        assert server.paths == ORDER
    assert same(vllm.lm, model)
    assert same(model, before)
    assert pushed.version == push.version == 1
    assert pushed.difference == pytest.approx(0.0, abs=1e-6)
    assert pushed.bytes > sum(p.numel() for p in model.parameters()) * 4
    assert 0 < pushed.saving < pushed.seconds


def test_the_policy_records_the_new_version(tmp_path: Path) -> None:
    vllm = FakeVLLM()
    with pushing(tmp_path, vllm) as (push, server):
        policy = VLLMPolicy("policy", make_tokenizer(), VLLMOptions(base_url=server.url))
        push._policy = policy
        versions = []
        for version in (3, 4):
            push.push(fresh(version / 100), version)
            versions.append(policy.submit([make_request()])[0].result(20).policy_version)
            policy.finish(make_request().context.episode_id)
        policy.close()
    assert versions == [3, 4]


def test_of_the_versions_in_the_folder_the_last_one_is_kept(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    with pushing(tmp_path, FakeVLLM()) as (push, _):
        for version in (1, 2, 2, 10):
            push.push(fresh(), version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v10", "venv"]


def test_adapters_are_pushed_merged_and_stay_apart_in_the_trainer(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False, modules_to_save=["norm"]
    )
    model = peft.get_peft_model(fresh(), settings, adapter_name="other")
    model.add_adapter("mine", settings)
    model.set_adapter("mine")
    with torch.no_grad():
        model.get_base_model().model.norm.modules_to_save["mine"].weight.add_(0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    vllm = FakeVLLM()
    with pushing(tmp_path, vllm) as (push, _):
        assert push.push(model, 1).difference == pytest.approx(0.0, abs=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    plain = copy.deepcopy(model).merge_and_unload()
    assert set(merged_weights(model)) == set(plain.state_dict())
    torch.testing.assert_close(dict(vllm.lm.named_parameters()), dict(plain.named_parameters()))
    with model.disable_adapter():
        torch.testing.assert_close(merged_weights(model), dict(fresh().state_dict()))


def test_weights_gathered_elsewhere_can_be_given(tmp_path: Path) -> None:
    vllm = FakeVLLM()
    with pushing(tmp_path, vllm) as (push, server):
        pushed = push.push(fresh(), 1, state=fresh(0.2).state_dict())
        assert pushed.difference is None
        assert server.paths == ORDER[:-1]
    assert same(vllm.lm, fresh(0.2))


def test_weights_can_be_written_in_a_shorter_type(tmp_path: Path) -> None:
    model = fresh(0.1)
    with pushing(tmp_path, FakeVLLM(), dtype="bfloat16", tolerance=1.0) as (push, _):
        difference = push.push(model, 1).difference
    assert difference is not None
    assert difference > 0
    tensors = load_file(next(tmp_path.glob("v1/*.safetensors")))
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert next(model.parameters()).dtype == torch.float32


def test_dropout_does_not_touch_the_comparison(tmp_path: Path) -> None:
    model = fresh()
    model.config.attention_dropout = 0.9
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.9
    model.train()
    with pushing(tmp_path, FakeVLLM()) as (push, _):
        assert push.push(model, 1).difference == pytest.approx(0.0, abs=1e-6)
    assert model.training


def test_older_servers_without_pause_are_served_too(tmp_path: Path) -> None:
    vllm = FakeVLLM(pause=[gives({"detail": "Not Found"}, 404)], reset_prefix_cache=[gives(b"")])
    with pushing(tmp_path, vllm) as (push, server):
        push.push(fresh(0.1), 1)
        assert server.paths == [path for path in ORDER if path != "/resume"]


def test_the_cache_is_reset_again_while_requests_run(tmp_path: Path) -> None:
    vllm = FakeVLLM()
    vllm.resets = [False, False, True]
    with pushing(tmp_path, vllm) as (push, server):
        push.push(fresh(), 1)
        assert server.paths.count("/reset_prefix_cache") == 3


def test_a_cache_that_cannot_be_reset_is_an_error(tmp_path: Path) -> None:
    vllm = FakeVLLM()
    vllm.resets = [False] * 9
    with pushing(tmp_path, vllm) as (push, server):
        with pytest.raises(InfrastructureError, match="requests are still running"):
            push.push(fresh(), 1)
        assert "/resume" not in server.paths
        assert push.version is None


@pytest.mark.parametrize("fault", [gives({"error": "busy"}, 503), gives(b"", 500), dies])
def test_passing_trouble_is_tried_again(fault: Any, tmp_path: Path) -> None:
    vllm = FakeVLLM(pause=[fault], collective_rpc=[None, fault], completions=[fault])
    with pushing(tmp_path, vllm) as (push, server):
        assert push.push(fresh(0.1), 1).version == 1
        assert len(server.paths) == len(ORDER) + 3


def refusing(status: int, text: str) -> list[Any]:
    return [gives({"error": {"message": text}}, status)] * 9


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "dead": ({"pause": [dies] * 9}, r"cannot be reached or died .*, 5 times. Look at its own log"),
    "broken": ({"collective_rpc": refusing(503, "loading")}, r"HTTP 503.*loading.*5 times"),
    "no dev mode": ({"collective_rpc": refusing(404, "Not Found")}, r"HTTP 404.*VLLM_SERVER_DEV_MODE=1"),
    "no extension": (
        {"collective_rpc": refusing(500, "'Worker' object has no attribute 'agentgym_load_weights'")},
        r"--worker-extension-cls vllm_worker\.WeightWorker",
    ),
    "key": ({"pause": refusing(401, "Unauthorized")}, r"HTTP 401.*Check the address, the key"),
    "no vLLM": ({"pause": [gives(b"<html>")] * 9}, "did not answer as vLLM does"),
    "silent workers": ({"collective_rpc": [gives({"results": [None]})]}, "did not answer agentgym_load_weights"),
    "refused weights": (
        {"collective_rpc": [gives({"results": [{"version": 1, "tensors": 3}, {"error": "CUDA out of memory"}]})]},
        "could not load the weights: CUDA out of memory. It must serve the model that is trained",
    ),
    "another trainer": (
        {"collective_rpc": [None, gives({"results": [{"version": 7}]})]},
        r"other weights than version 1.*Is another trainer pushing",
    ),
    "no log-probs": ({"completions": [gives({"choices": [{"prompt_logprobs": None}]})]}, "gives no prompt_logprobs"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failing_server_is_an_error_that_names_the_mend(name: str, tmp_path: Path) -> None:
    faults, message = FAULTS[name]
    with pushing(tmp_path, FakeVLLM(**faults)) as (push, server):
        with pytest.raises(InfrastructureError, match=message):
            push.push(fresh(0.1), 1)
        assert push.version is None
        if name not in ("no log-probs",):
            assert "/resume" not in server.paths  # nobody is answered from weights of which nothing is known


def test_a_silent_server_is_given_up(tmp_path: Path) -> None:
    with pushing(tmp_path, hangs, timeout=0.3, attempts=2) as (push, server):
        with pytest.raises(InfrastructureError, match=r"did not answer POST /pause.* in 0\.3 s, 2 times"):
            push.push(fresh(), 1)
        assert len(server.paths) == 2


def test_after_a_failed_push_the_next_one_mends_it(tmp_path: Path) -> None:
    vllm = FakeVLLM(collective_rpc=refusing(404, "Not Found")[:1])
    with pushing(tmp_path, vllm) as (push, _):
        with pytest.raises(InfrastructureError):
            push.push(fresh(0.1), 1)
        assert push.push(fresh(0.2), 2).version == 2
    assert same(vllm.lm, fresh(0.2))
    assert [path.name for path in tmp_path.iterdir()] == ["v2"]


def test_a_server_that_lies_about_loading_is_found_out(tmp_path: Path) -> None:
    loaded = gives({"results": [{"version": 1}]})
    with (
        pushing(tmp_path, FakeVLLM(collective_rpc=[loaded, loaded])) as (push, _),
        pytest.raises(InfrastructureError, match=r"differ from the trainer's by .* Does it serve the trained model"),
    ):
        push.push(fresh(0.5), 1)


def test_every_worker_must_have_the_version(tmp_path: Path) -> None:
    vllm = FakeVLLM(workers=2)
    with pushing(tmp_path, vllm) as (push, _):
        push.push(fresh(0.1), 1)
        vllm.workers[1].agentgym_load_weights = lambda **options: {"version": 1}  # type: ignore[method-assign]
        with pytest.raises(InfrastructureError, match="other weights than version 2"):
            push.push(fresh(0.2), 2)


def test_half_written_weights_are_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a reader looks all the time, every version that it finds is whole; a killed push leaves none."""
    model, seen, torn, stop = fresh(), set(), [], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            for folder in tmp_path.glob("v[0-9]*"):
                try:
                    tensors = load_file(folder / "model.safetensors")
                except FileNotFoundError:
                    if (folder / "config.json").exists():  # not because it has just been removed
                        torn.append(folder.name)
                    continue
                seen.add(folder.name)
                if set(tensors) != {name for name, _ in model.named_parameters()}:
                    torn.append(folder.name)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for version in range(20):
            save_weights(model, tmp_path, version)
    finally:
        stop.set()
        thread.join(20)
    assert not torn
    assert len(seen) > 3

    def killed(*args: Any, **options: Any) -> None:
        original(*args, **options)
        raise KeyboardInterrupt

    original = model.save_pretrained
    with monkeypatch.context() as patch:
        patch.setattr(weight_push.shutil, "rmtree", lambda *args, **options: None)
        model.save_pretrained = killed
        with pytest.raises(KeyboardInterrupt):
            save_weights(model, tmp_path, 99)
        del model.save_pretrained
    assert not (tmp_path / "v99").exists()
    assert len(list(tmp_path.glob(".part-*"))) == 1
    save_weights(model, tmp_path, 100)
    assert not list(tmp_path.glob(".part-*"))


def test_the_worker_loads_nothing_while_a_file_is_short_or_absent(tmp_path: Path) -> None:
    worker = Worker(Runner())
    folder, sizes = save_weights(fresh(0.1), tmp_path, 1)
    assert list(sizes) == ["model.safetensors"]
    size = sizes["model.safetensors"]
    longer = worker.agentgym_load_weights(str(folder), 1, {"model.safetensors": size + 1})
    assert longer == {"error": f"{folder / 'model.safetensors'} has {size} of {size + 1} bytes"}
    absent = worker.agentgym_load_weights(str(tmp_path / "elsewhere"), 1, sizes)
    assert "must be shared with the server" in absent["error"]
    assert worker.agentgym_weights_version() == {"version": 0}
    assert same(worker.model_runner.model.lm, fresh())


@pytest.mark.parametrize("runner", [Runner, OldRunner])
def test_the_worker_names_no_version_for_weights_that_do_not_fit(runner: type[OldRunner], tmp_path: Path) -> None:
    worker = Worker(runner())
    model = fresh(0.1)
    fewer = {name: value for name, value in model.state_dict().items() if "layers.1" not in name}
    folder, sizes = save_weights(model, tmp_path, 1, state=fewer)
    lacking = worker.agentgym_load_weights(str(folder), 1, sizes)
    assert lacking["error"].startswith("the checkpoint lacks 9 parameters of the served model: ['model.layers.1.")
    assert worker.agentgym_weights_version() == {"version": -1}
    wrong = {**model.state_dict(), "model.norm.weight": torch.zeros(7)}
    folder, sizes = save_weights(model, tmp_path, 2, state=wrong)
    assert "loading stopped after" in worker.agentgym_load_weights(str(folder), 2, sizes)["error"]
    assert worker.agentgym_weights_version() == {"version": -1}
    folder, sizes = save_weights(model, tmp_path, 3)
    assert worker.agentgym_load_weights(str(folder), 3, sizes) == {"version": 3, "tensors": len(model.state_dict())}
    assert worker.agentgym_weights_version() == {"version": 3}


class PackingMethod:
    """As vLLM's on CPUs: the layer computes with a packed copy of its weight."""

    def embedding(self) -> None:
        """What tells vLLM's methods for embeddings and output layers from the others."""

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x: x @ packed.T


def test_an_output_layer_that_is_kept_packed_is_packed_again(tmp_path: Path) -> None:
    worker = Worker(Runner())
    head = worker.model_runner.model.lm.lm_head
    head.quant_method = PackingMethod()
    head.quant_method.process_weights_after_loading(head)
    model = fresh(0.1)
    folder, sizes = save_weights(model, tmp_path, 1)
    worker.agentgym_load_weights(str(folder), 1, sizes)
    x = torch.ones(1, head.weight.shape[1])
    torch.testing.assert_close(head.cpu_linear(x), model.lm_head(x))


def test_models_that_cannot_be_pushed_are_refused(tmp_path: Path) -> None:
    model = fresh()
    model.is_quantized = True
    with pytest.raises(UsageError, match="load the model unquantised"):
        save_weights(model, tmp_path, 1)
    model = fresh()
    model._hf_peft_config_loaded = True  # as transformers' own add_adapter leaves it
    with pytest.raises(UsageError, match=r"peft\.get_peft_model"):
        save_weights(model, tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="the weights cannot be written"):
        save_weights(fresh(), tmp_path / "file", 1)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("localhost:8000", {}, "no address"),
        ("http://localhost:8000/v1", {"dtype": "float33"}, "unknown type 'float33'"),
        ("http://localhost:8000/v1", {"probe": [1]}, "at least two tokens"),
        ("http://localhost:8000/v1", {"tolerance": 0.0}, "tolerance above 0"),
        ("http://localhost:8000/v1", {"api_key_env": "AGENTGYM_NO_KEY"}, "AGENTGYM_NO_KEY .* is not set"),
    ],
)
def test_wrong_options_are_named(url: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        WeightPush(url, tmp_path, "policy", **options)


def test_the_key_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    with pushing(tmp_path, FakeVLLM(), api_key_env="MY_KEY") as (push, server):
        push.push(fresh(), 1)
        assert set(server.authorizations) == {"Bearer secret"}
