"""Whole tiny models of transformers with our experts: training, compiling, checkpointing, generation, Trainer, PEFT."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import bounds
from tests.asserts import bitwise
from tests.hosts.families import experts_module, families, problem, results
from tests.hosts.models import TINY, experts_of, gradients, model, tokens

pytestmark = [
    pytest.mark.rule("HST-4"),
    # torch's and the host's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

SLOW = pytest.mark.slow
NAMES = [pytest.param(name, marks=() if name in ("Olmoe", "GptOss") else SLOW) for name in TINY]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch.compiler.reset()


def _ours(made: Any) -> Any:
    made.set_experts_implementation("jax_grouped")
    assert all(each.config._experts_implementation == "jax_grouped" for each in experts_of(made))
    return made


def _near(ours: dict[str, Tensor], own: dict[str, Tensor], layers: int = 2) -> None:
    """Two float32 runs of a model: each layer adds its error and carries those before it."""
    assert ours.keys() == own.keys()
    for name, each in own.items():
        error, norm = (ours[name] - each).norm(), each.norm()
        assert error <= bounds.MODEL * layers * norm, f"{name}: {error / norm:.3g}"


@pytest.mark.parametrize("name", NAMES)
def test_a_training_step_is_that_of_eager_experts(registered: Any, name: str) -> None:
    made, ids = model(name), tokens()
    own = gradients(made, ids)
    ours = gradients(_ours(made), ids)
    _near(ours, own)
    of_experts = [each for each in own if ".experts." in each]
    assert of_experts
    assert all(own[each].any() for each in of_experts)


@pytest.mark.parametrize("name", NAMES)
def test_one_line_loads_a_model(registered: Any, name: str, tmp_path: Path) -> None:
    made, ids = model(name), tokens()
    made.save_pretrained(tmp_path)
    loaded = registered.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="jax_grouped")
    assert all(each.config._experts_implementation == "jax_grouped" for each in experts_of(loaded))
    with torch.no_grad():
        bitwise(loaded(input_ids=ids).logits, _ours(made)(input_ids=ids).logits)
    # the weights of the host's own checkpoint are read in place
    experts = experts_of(loaded)[0]
    assert type(experts.down_proj) is nn.Parameter
    assert "experts_implementation" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=SLOW)])
def test_narrow_models(registered: Any, dtype: torch.dtype) -> None:
    made, ids = model("Olmoe", dtype=dtype), tokens()
    exact = gradients(copy.deepcopy(made).float(), ids)
    own, ours = gradients(made, ids), gradients(_ours(made), ids)
    for name, each in exact.items():
        assert ours[name].dtype == own[name].dtype
        error, theirs = ((found[name].float() - each).norm() for found in (ours, own))
        if name != "loss":  # the error of one number may be any, in either run
            assert error <= bounds.BESIDE_EXPERTS * theirs, f"{name}: {error:.3g} beside {theirs:.3g}"


# ---- compiling and checkpointing


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_model_compiles_whole(registered: Any, name: str) -> None:
    made, ids = _ours(model(name)), tokens()
    own = gradients(made, ids)
    made.forward = torch.compile(made.forward, fullgraph=True, backend="aot_eager")
    for found, each in gradients(made, ids).items():
        bitwise(each, own[found], found)


def test_layers_share_one_graph(registered: Any) -> None:
    """Compiled layer by layer, as users do with deep models: nothing of ours tells one layer from the next."""
    import torch._dynamo.utils as dynamo

    made, ids = _ours(model("GptOss", num_hidden_layers=3, layer_types=["full_attention"] * 3)), tokens()
    graphs = {}
    for implementation in ("grouped_mm", "jax_grouped"):
        made.set_experts_implementation(implementation)
        torch.compiler.reset()
        dynamo.counters.clear()
        own = made(input_ids=ids, use_cache=False).logits
        for layer in made.model.layers:
            layer.compile(fullgraph=True, backend="eager")  # Dynamo alone decides what a graph is of
        bitwise(made(input_ids=ids, use_cache=False).logits, own)
        for layer in made.model.layers:
            layer._compiled_call_impl = None
        graphs[implementation] = dynamo.counters["stats"]["unique_graphs"]
    assert graphs["jax_grouped"] <= graphs["grouped_mm"] < 3


def test_numbers_of_gates_are_guarded_in_a_graph(registered: Any) -> None:
    family = next(each for each in families() if each.name == "GptOssExperts")
    module = experts_module(family)
    p = problem(module)
    module.config._experts_implementation = "jax_grouped"
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for limit in (7.0, 0.5, 7.0):
        module.limit = limit
        bitwise(compiled(p.x, p.ids, p.weights), module(p.x, p.ids, p.weights), f"limit {limit}")


def test_an_unknown_gate_says_so_when_it_is_compiled(registered: Any) -> None:
    family = next(each for each in families() if each.name == "GptOssExperts")
    module = experts_module(family)
    p = problem(module)
    module.config._experts_implementation, module.limit = "jax_grouped", [7.0]
    with pytest.raises(Exception, match="`_apply_gate` of GptOssExperts"):
        torch.compile(module, fullgraph=True, backend="aot_eager")(p.x, p.ids, p.weights)


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=SLOW)])
def test_gradient_checkpointing(registered: Any, reentrant: bool) -> None:
    made, ids = _ours(model("Olmoe")).train(), tokens()
    own = gradients(made, ids)
    made.gradient_checkpointing_enable({"use_reentrant": reentrant})
    made.enable_input_require_grads()
    for name, each in gradients(made, ids).items():
        bitwise(each, own[name], name)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=SLOW)])
def test_autocast(registered: Any, compiled: bool) -> None:
    made, ids = model("Olmoe"), tokens()
    exact = gradients(made, ids)
    with torch.autocast("cpu", torch.bfloat16):
        own = gradients(made, ids)
    _ours(made)
    if compiled:
        made.forward = torch.compile(made.forward, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        ours = gradients(made, ids)
        y = experts_of(made)[0](torch.randn(4, 64), torch.tensor([[0, 1]] * 4), torch.ones(4, 2))
    assert y.dtype == torch.float32, "the dtype of the tokens, as the host's paths give"
    for name, each in exact.items():
        assert ours[name].dtype == own[name].dtype
        error, theirs = ((found[name].float() - each).norm() for found in (ours, own))
        if name != "loss":
            assert error <= bounds.BESIDE_EXPERTS * theirs, f"{name}: {error:.3g} beside {theirs:.3g}"


# ---- generation


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_gives_the_tokens_of_eager_experts(registered: Any, name: str, cache: str) -> None:
    made, ids = model(name).eval(), tokens(length=5)
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": None if cache == "dynamic" else cache}
    own = made.generate(ids, attention_mask=torch.ones_like(ids), **options)
    ours = _ours(made).generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert own.shape == (2, 17)
    assert torch.equal(ours, own)


def test_generation_compiles_with_a_static_cache(registered: Any) -> None:
    made, ids = _ours(model("Olmoe")).eval(), tokens(length=5)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    own = made.generate(ids, **options)
    config = registered.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    ours = made.generate(ids, cache_implementation="static", compile_config=config, **options)
    assert torch.equal(ours, own)


# ---- expert parallelism


def test_places_of_other_ranks_give_nothing(registered: Any) -> None:
    """Under expert parallelism of the host, a place of another rank has the id `num_experts`, and weight 0."""
    for family in families():
        if family.name not in ("MixtralExperts", "GptOssExperts", "MuseSparkExperts"):
            continue
        module = experts_module(family)
        module._is_expert_parallel = True
        p = problem(module)
        away = (torch.arange(p.ids.numel()) % 3 == 1).reshape(p.ids.shape)
        away[5] = True
        p = p._replace(ids=p.ids.masked_fill(away, module.num_experts), weights=p.weights.masked_fill(away, 0.0))
        own, ours = results(module, p, "batched_mm"), results(module, p, "jax_grouped")
        assert not ours["y"][5].any()
        assert not ours["x"][5].any()
        assert not ours["weights"][away].any()
        for name, each in own.items():
            assert (ours[name] - each).norm() <= 2 * bounds.LAYER * each.norm(), f"{family}: {name}"
        more = p._replace(weights=p.weights.masked_fill(away, 3.0))  # whatever the weight there is
        bitwise(results(module, more, "jax_grouped")["y"], ours["y"])


# ---- libraries around a model


def _needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{missing} not installed; `make test-hosts` installs it")


@_needs("accelerate")
def test_the_trainer_takes_two_steps(registered: Any, tmp_path: Path) -> None:
    rows = [{"input_ids": each, "labels": each} for each in tokens(rows=8)]

    def trained(implementation: str) -> tuple[dict[str, Tensor], list[float]]:
        made = model("Olmoe")
        made.set_experts_implementation(implementation)
        arguments = registered.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            optim="sgd",
            max_grad_norm=0.0,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            gradient_checkpointing=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        before = {name: each.detach().clone() for name, each in made.named_parameters()}
        trainer = registered.Trainer(model=made, args=arguments, train_dataset=rows)
        trainer.train()
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        return {name: each.detach() - before[name] for name, each in made.named_parameters()}, losses

    (own, own_losses), (ours, our_losses) = trained("eager"), trained("jax_grouped")
    assert len(our_losses) == 2
    assert our_losses == pytest.approx(own_losses, rel=bounds.MODEL * 2)
    for name, each in own.items():
        assert each.any(), name
        # a change is a small difference of parameters, which are rounded when they are stored
        rounding = 2 * bounds.F32_HALF_ULP * dict(model("Olmoe").named_parameters())[name].norm()
        assert (ours[name] - each).norm() <= 4 * bounds.MODEL * each.norm() + 2 * rounding, name


@_needs("peft")
@pytest.mark.parametrize("frozen", [True, False])
def test_lora_on_attention(registered: Any, frozen: bool) -> None:
    import peft

    def adapted(implementation: str) -> dict[str, Tensor]:
        made = model("Olmoe")
        made.set_experts_implementation(implementation)
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        made = peft.get_peft_model(made, config)
        if not frozen:
            for each in experts_of(made):
                each.requires_grad_(True)
        return gradients(made, tokens())

    own, ours = adapted("eager"), adapted("jax_grouped")
    _near(ours, own)
    assert any("lora_A" in name for name in ours)
    assert any("down_proj" in name for name in ours) is not frozen


@_needs("peft")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=SLOW)])
def test_lora_on_the_parameters_of_experts(registered: Any, compiled: bool) -> None:
    """PEFT makes W + s A B while a module runs; the sum is then the operand, and its gradient goes on to A and B."""
    import peft

    def adapted(implementation: str, name: str) -> dict[str, Tensor]:
        made = model(name)
        made.set_experts_implementation(implementation)
        torch.manual_seed(1)
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = peft.LoraConfig(
            r=4, target_modules=[], target_parameters=targets, init_lora_weights=False, lora_dropout=0.0
        )
        made = peft.get_peft_model(made, config)
        if compiled and implementation == "jax_grouped":
            made.forward = torch.compile(made.forward, backend="aot_eager")
        return gradients(made, tokens())

    for name in ("Olmoe", "GptOss"):
        own, ours = adapted("eager", name), adapted("jax_grouped", name)
        _near(ours, own)
        assert sum("lora_" in each and ".experts." in each for each in ours) == 8
