"""Recipes in models of transformers: which one applies, and the state of delayed scaling in the host's modules."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.asserts import bitwise, refused
from tests.hosts.families import experts_module, families, problem, results
from tests.hosts.models import experts_of, gradients, model, tokens
from tests.torch_frontend.torch_tools import allocations, counted_launches
from torch_bridge import MXFP8, FP8Block, FP8Current, FP8Delayed, grouped_mlp, route, routed_mlp
from torch_bridge.integrations.transformers import NAME, prepare, register, update_scaling

pytestmark = [
    pytest.mark.rule("HST-5"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, and the host's
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
BUFFERS = ("scaling_scale", "scaling_history", "scaling_top")


def _model(recipe: Any = None, dtype: torch.dtype = torch.bfloat16, name: str = "Olmoe") -> Any:
    made = model(name, dtype=dtype, **SIZES)
    if recipe is not None:
        prepare(made, recipe=recipe)
    made.set_experts_implementation("jax_grouped")
    return made


def _step(made: Any, seed: int = 0) -> dict[str, Tensor]:
    found = gradients(made, tokens(seed=seed))
    update_scaling(made)
    return found


def _states(made: Any) -> dict[str, Tensor]:
    return {name: each for name, each in made.state_dict().items() if f".{NAME}." in name}


def _same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, each in theirs.items():
        bitwise(ours[name], each, name)


# ---- which recipe applies


@pytest.mark.parametrize("recipe", [FP8Current, FP8Block, MXFP8], ids=lambda each: each.name)
def test_a_recipe_is_that_of_the_operation(registered: Any, recipe: Any) -> None:
    made = _model()
    module = experts_of(made)[0]
    x = torch.randn(9, 128, dtype=torch.bfloat16)
    ids, weights = torch.randint(0, 8, (9, 2)), torch.rand(9, 2)
    plain = routed_mlp(x, ids, weights, module.gate_up_proj, module.down_proj)
    ours = routed_mlp(x, ids, weights, module.gate_up_proj, module.down_proj, recipe=recipe)
    assert not torch.equal(plain, ours)
    with register(recipe=recipe):
        bitwise(module(x, ids, weights), ours, "the recipe of register")
    with register():
        bitwise(module(x, ids, weights), plain, "no recipe")
        assert prepare(made, recipe=recipe) == [f"model.layers.{at}.mlp.experts" for at in range(2)]
        bitwise(module(x, ids, weights), ours, "the recipe of prepare")
    with register(recipe=FP8Delayed):
        bitwise(module(x, ids, weights), ours, "the recipe of prepare, before that of register")


@pytest.mark.rule("HST-1", "HST-5")
@pytest.mark.parametrize("recipe", [FP8Block, FP8Delayed], ids=lambda each: each.name)
def test_weights_are_saved_as_codes_or_as_they_are(registered: Any, recipe: Any) -> None:
    """Without a choice, as codes where these take less than the host's own path would keep of rows."""
    found, kept, quantised = {}, {}, {}
    for saved, rows in (("quantized", 9), ("input", 9), (None, 9), (None, 300)):
        module = experts_of(_model(recipe))[0]
        x = torch.randn(rows, 128, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        ids, weights = torch.arange(2 * rows).view(rows, 2) % 8, torch.full((rows, 2), 0.5)
        leaves = [x, module.gate_up_proj, module.down_proj]
        with register(saved_weights=saved):
            with allocations() as made:
                y = module(x, ids, weights)
            codes = [each for each in made if not each.expired()]
            with counted_launches() as calls:
                found[saved, rows] = torch.autograd.grad(y.sum(), leaves)
        kept[saved, rows], quantised[saved, rows] = len(codes), calls.count("quantize")
    for one, two in zip(found["quantized", 9], found["input", 9], strict=True):
        bitwise(two, one, "a gradient")
    assert kept["input", 9] == kept["quantized", 9] - 4, "codes and scales of two weights"
    assert quantised["input", 9] == quantised["quantized", 9] + 2
    assert kept[None, 9] == kept["input", 9], "a few rows beside 8 experts"
    assert kept[None, 300] == kept["quantized", 9], "many rows"


def test_an_unknown_way_to_save_weights_is_refused(registered: Any) -> None:
    words = ["`saved_weights` of register: 'codes'", "expected None or one of quantized, input", "choose one"]
    with refused(ValueError, words):
        register(saved_weights="codes")


def test_delayed_scaling_without_a_state_is_refused(registered: Any) -> None:
    made = _model()
    with (
        register(recipe=FP8Delayed),
        refused(ValueError, ["`recipe` of register", "OlmoeExperts", "no state", "prepare("]),
    ):
        made(input_ids=tokens())


def test_what_cannot_be_prepared_is_refused(registered: Any) -> None:
    nothing: Any = None
    with refused(ValueError, ["prepare: NoneType without experts", "expected a Recipe and a model", "pass both"]):
        prepare(nothing, recipe=FP8Delayed)
    with refused(ValueError, ["update_scaling: NoneType", "expected one in each", "prepare("]):
        update_scaling(nothing)
    with refused(ValueError, ["prepare: Linear without experts", "expected a Recipe and a model", "pass both"]):
        prepare(torch.nn.Linear(2, 2), recipe=FP8Delayed)
    with refused(TypeError, ["`recipe` of prepare", "str", "expected a Recipe"]):
        prepare(_model(), recipe="FP8Delayed")
    for made in (_model(), _model(FP8Block)):
        with refused(ValueError, ["update_scaling: OlmoeForCausalLM", "expected one in each", "prepare("]):
            update_scaling(made)
    with refused(TypeError, ["`process_group` of update_scaling"]):
        update_scaling(_model(FP8Delayed), process_group=3)


# ---- state


def test_the_state_is_in_buffers_of_the_hosts_modules(registered: Any) -> None:
    made = _model(FP8Delayed)
    assert set(_states(made)) == {f"model.layers.{at}.mlp.experts.{NAME}.{each}" for at in range(2) for each in BUFFERS}
    assert not any(_states(made)[name].any() for name in _states(made) if not name.endswith("top"))
    _step(made)
    for name, each in _states(made).items():
        assert each.dtype == torch.float32
        assert each.any(), f"{name} has been updated"
    before = {name: each.clone() for name, each in _states(made).items()}
    assert prepare(made, recipe=FP8Delayed)
    _same(_states(made), before)  # a second call keeps it
    made.float()
    made.to(torch.float16)
    _same(_states(made), before)


def test_the_state_of_one_step_scales_the_next(registered: Any) -> None:
    made, fresh = _model(FP8Delayed), _model(FP8Delayed)
    with register(recipe=FP8Block):  # `prepare` has the last word
        _step(made)
        assert not torch.equal(_step(made, 1)["logits"], _step(fresh, 1)["logits"])
    before = {name: each.clone() for name, each in _states(made).items()}
    with torch.no_grad():
        made(input_ids=tokens(seed=3))
    _same(_states(made), before)  # inference leaves nothing for the next step


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_carries_the_state(registered: Any, assign: bool) -> None:
    made = _model(FP8Delayed)
    _step(made)
    saved = copy.deepcopy(made.state_dict())
    loaded = _model(FP8Delayed)
    with torch.no_grad():
        for each in loaded.parameters():
            each.zero_()
    if assign:
        loaded.to("meta")
    loaded.load_state_dict(saved, assign=assign)
    if assign:  # rotary frequencies are not saved
        loaded.model.rotary_emb = copy.deepcopy(made.model.rotary_emb)
    loaded.tie_weights()
    _same(_states(loaded), _states(made))
    _same(_step(loaded, 1), _step(made, 1))
    _same(_states(loaded), _states(made))


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_without_a_state_starts_afresh(registered: Any, assign: bool) -> None:
    made = _model(FP8Delayed)
    if assign:
        made.to("meta")
    made.load_state_dict(_model().state_dict(), assign=assign)
    if assign:
        assert all(each.is_meta for each in _states(made).values())
        prepare(made, recipe=FP8Delayed)
    assert all(each.any() for name, each in _states(made).items() if name.endswith("top"))
    assert not any(each.any() for name, each in _states(made).items() if not name.endswith("top"))


@pytest.mark.parametrize("name", ["Olmoe", pytest.param("GptOss", marks=pytest.mark.slow)])
def test_the_hosts_own_files_carry_the_state(registered: Any, name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    made = _model(FP8Delayed, name=name)
    _step(made)
    made.save_pretrained(tmp_path)
    loaded = registered.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="jax_grouped")
    prepare(loaded, recipe=FP8Delayed)
    missing = loaded.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False).missing_keys
    assert not [each for each in missing if NAME in each]
    _same(_states(loaded), _states(made))
    _same(_step(loaded, 1), _step(made, 1))


def test_checkpointing_leaves_the_state_of_one_pass(registered: Any) -> None:
    plain, again = (_model(FP8Delayed).train() for _ in range(2))
    again.gradient_checkpointing_enable({"use_reentrant": False})
    again.enable_input_require_grads()
    for _ in range(2):
        _same(_step(again), _step(plain))
    _same(_states(again), _states(plain))


@pytest.mark.slow
def test_a_compiled_model_updates_its_state(registered: Any) -> None:
    plain, compiled = (_model(FP8Delayed, torch.float32) for _ in range(2))
    compiled.forward = torch.compile(compiled.forward, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        _same(_step(compiled), _step(plain))
    _same(_states(compiled), _states(plain))
    torch.compiler.reset()


def test_experts_with_a_norm_take_recipes(transformers: Any) -> None:
    family = next(each for each in families() if "post_expert_norm" in each.decorator)
    module = experts_module(family, dtype=torch.bfloat16)
    p = problem(module).to(torch.bfloat16)
    with register():
        plain = results(module, p, "jax_grouped")["y"]
    with register(recipe=MXFP8):
        ours = results(module, p, "jax_grouped")["y"]
    rows, sizes, permutation = route.permute(p.x, p.ids, module.num_experts)
    rows = module.post_expert_norm(grouped_mlp(rows, module.gate_up_proj, module.down_proj, sizes, recipe=MXFP8))
    bitwise(ours, route.unpermute(rows, permutation, p.weights))
    assert not torch.equal(ours, plain)
