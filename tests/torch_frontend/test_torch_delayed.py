"""Delayed weight gradients of the modules: the queue, sums of gradients, hooks (docs/contracts.md)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests import asserts
from tests.torch_frontend.nn_tools import CASE, MODULES, main_grads, parameters_of, setup
from tests.torch_frontend.torch_tools import counted_launches, leaf
from torch_bridge import nn


def _run(form: str, listed: bool, accumulate: bool, delay: bool, microbatches: int, tied: bool = False) -> list[Any]:
    """`main_grad` or `.grad` of each weight after some microbatches with different rows."""
    s = setup(form, listed, accumulate=accumulate, delay=delay)
    if accumulate:
        main_grads(s.weights, 0.25)
    for weight in s.weights:
        weight.overwrite_main_grad = not tied  # for the first microbatch alone, although none has been drained by then
    for at in range(microbatches):
        x = leaf(s.x * (at + 1))
        y = s.run(x)
        if tied:  # the same weights again, in the same pass
            y = y + s.run(leaf(s.x * 0.5))
        y.backward(s.dy)
        for weight in s.weights:
            weight.overwrite_main_grad = False
    if delay:
        assert s.module.pending_wgrads() == microbatches * (1 + tied)
        for left in range(s.module.pending_wgrads(), 0, -1):
            assert s.module.pending_wgrads() == left
            s.module.backward_dw()
        assert s.module.pending_wgrads() == 0
    return [weight.main_grad if accumulate else weight.grad for weight in s.weights]


@pytest.mark.rule("DLY-1", "DLY-2", "DLY-3", "GRD-1", "GRD-4", "DEF-2", "TE #3437")
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@pytest.mark.parametrize("form", MODULES)
def test_drained_microbatches_equal_the_undelayed_run(
    form: str, listed: bool, accumulate: bool, microbatches: int
) -> None:
    later = _run(form, listed, accumulate, True, microbatches)
    now = _run(form, listed, accumulate, False, microbatches)
    for got, expected in zip(later, now, strict=True):
        asserts.bitwise(got, expected)


@pytest.mark.rule("DLY-3", "DEF-2", "TE #3552")
@pytest.mark.parametrize("accumulate", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("form", MODULES)
def test_tied_weights_add_up(form: str, accumulate: bool) -> None:
    """Two uses in a pass: autograd sums the two before `.grad`, the kernel and the queue add one after the other."""
    later, now = (_run(form, False, accumulate, delay, 1 + accumulate, tied=True) for delay in (True, False))
    for got, expected in zip(later, now, strict=True):
        asserts.bitwise(got, expected)


@pytest.mark.rule("DLY-3", "GRD-2")
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@pytest.mark.parametrize("form", MODULES)
def test_a_gradient_that_is_there_is_added_to_in_place(form: str, listed: bool) -> None:
    """Autograd does so too: wrappers and optimisers hold views of it, and captured graphs its address."""
    s = setup(form, listed, delay=True)
    held = []
    for weight in s.weights:
        weight.grad = torch.full(weight.shape, 0.5)
        held.append((weight.grad, weight.grad.data_ptr()))
    s.backward()
    s.module.backward_dw()
    for weight, (gradient, address) in zip(s.weights, held, strict=True):
        assert weight.grad is gradient
        assert gradient.data_ptr() == address
    assert all((gradient != 0.5).any() for gradient, _ in held if not listed)


@pytest.mark.rule("DLY-3", "ERR-1")
def test_weights_that_are_computed_from_others_are_refused() -> None:
    """Their gradient would end at what was computed, after backward."""
    layer = nn.GroupedLinear(2, 4, 4, delay_wgrad_compute=True)
    torch.nn.utils.parametrizations.orthogonal(layer, "weight1")
    with asserts.refused(ValueError, ["`delay_wgrad_compute`", "True beside", "expected Parameters", "leave one"]):
        layer(torch.ones(3, 4), [1, 2])
    with torch.no_grad():
        layer(torch.ones(3, 4), [1, 2])


@pytest.mark.rule("DLY-2", "DLY-9")
@pytest.mark.parametrize("form", MODULES)
def test_an_empty_store_is_a_no_op_without_hooks(form: str) -> None:
    s = setup(form, False, delay=True)
    fired: list[int] = []
    for linear in s.linears:
        linear.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append(1))
    s.module.backward_dw()
    s.module.backward_dw(all=True)
    assert not fired
    for weight in s.weights:
        weight.requires_grad_(False)
    s.backward()
    assert s.module.pending_wgrads() == 0, "frozen weights put nothing"
    s.module.backward_dw(all=True)
    assert not fired


@pytest.mark.rule("DLY-5", "DLY-6", "MLM #4311", "MLM #6132")
@pytest.mark.parametrize("form", [form for form in MODULES if form != "GroupedLinear"])
@pytest.mark.parametrize("every", [False, True])
def test_fc2_comes_before_fc1_and_products_before_hooks(form: str, every: bool) -> None:
    s = setup(form, False, accumulate=True, delay=True)
    main_grads(s.weights, 0.0)
    for weight in s.weights:
        weight.grad_added_to_main_grad = False
    fc1, fc2 = s.linears
    seen: list[Any] = []

    def hook(name: str) -> Any:
        return lambda: seen.append(
            (name, [bool(w.main_grad.any()) for w in s.weights], [w.grad_added_to_main_grad for w in s.weights])
        )

    fc1.register_wgrad_accumulation_and_reduce_hooks(hook("fc1"))
    s.backward()
    s.backward()
    fc2.register_wgrad_accumulation_and_reduce_hooks(hook("fc2"))  # after forward: hooks are read at call time
    with counted_launches() as calls:
        s.module.backward_dw(all=every)
    written = ([True, True], [True, True])
    assert seen == [("fc2", *written), ("fc1", *written)] * (2 if every else 1)
    assert calls == ["grouped_matmul"] * (4 if every else 2)
    s.module.fire_wgrad_hooks()
    assert [name for name, *_ in seen[-2:]] == ["fc2", "fc1"]


@pytest.mark.rule("DLY-5", "DLY-2")
def test_a_layer_may_be_drained_alone() -> None:
    s = setup("GroupedMLP", False, delay=True)
    s.backward()
    s.linears[1].backward_dw()
    assert [each.pending_wgrads() for each in s.linears] == [1, 0]
    assert s.module.pending_wgrads() == 1
    s.module.backward_dw()
    whole = setup("GroupedMLP", False)
    whole.backward()
    for weight, expected in zip(s.weights, whole.weights, strict=True):
        asserts.bitwise(weight.grad, expected.grad)


@pytest.mark.rule("DLY-3", "ERR-1")
@pytest.mark.parametrize("written", ["x", "dy", "sizes"])
def test_rows_that_were_written_meanwhile_are_noticed(written: str) -> None:
    """As autograd notices it between forward and backward."""
    layer = nn.GroupedLinear(2, 4, 4, bias=False, delay_wgrad_compute=True)
    rows = {"x": torch.ones(3, 4), "dy": torch.ones(3, 4), "sizes": torch.tensor([1, 2], dtype=torch.int32)}
    layer(rows["x"], rows["sizes"]).backward(rows["dy"])
    rows[written].mul_(2)
    with asserts.refused(RuntimeError, ["backward_dw", "modified by an inplace", "values of then", "call backward_dw"]):
        layer.backward_dw()
    assert layer.weight0.grad is None


@pytest.mark.rule("DLY-3")
@pytest.mark.parametrize("listed", [False, True])
def test_parameters_of_a_functional_call_get_the_gradients(listed: bool) -> None:
    """As in autograd: the Parameters that forward read, not those of the layer."""
    options: Any = {"bias": False, "single_grouped_weight": not listed}
    layer = nn.GroupedLinear(2, 4, 4, delay_wgrad_compute=True, **options)
    plain = nn.GroupedLinear(2, 4, 4, **options)
    given = {name: Parameter(torch.ones_like(each)) for name, each in layer.named_parameters()}
    torch.func.functional_call(layer, given, (torch.ones(3, 4), [1, 2])).sum().backward()
    layer.backward_dw()
    expected = {name: Parameter(each.detach()) for name, each in given.items()}
    torch.func.functional_call(plain, expected, (torch.ones(3, 4), [1, 2])).sum().backward()
    for name, each in layer.named_parameters():
        assert each.grad is None, name
        asserts.bitwise(given[name].grad, expected[name].grad, name)


@pytest.mark.rule("DLY-6", "ERR-1")
def test_hooks_are_functions() -> None:
    layer: Any = nn.GroupedLinear(2, 4, 4, delay_wgrad_compute=True)
    with asserts.refused(TypeError, ["`hook`", "NoneType", "expected a function", "pass one"]):
        layer.register_wgrad_accumulation_and_reduce_hooks(None)


@pytest.mark.rule("DLY-6")
def test_a_hook_that_another_one_registers_waits_for_the_next_call() -> None:
    layer, fired = nn.GroupedLinear(2, 4, 4, delay_wgrad_compute=True), []

    def hook() -> None:
        fired.append(len(fired))
        layer.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append("second"))

    layer.register_wgrad_accumulation_and_reduce_hooks(hook)
    layer.fire_wgrad_hooks()
    assert fired == [0]
    layer.fire_wgrad_hooks()
    assert fired == [0, 1, "second"]


@pytest.mark.rule("DLY-4")
@pytest.mark.parametrize("form", MODULES)
def test_operands_are_kept_until_they_are_used(form: str) -> None:
    """An entry is dropped after its launch. Weights and biases are not kept alive."""
    import weakref

    s = setup(form, False, delay=True)
    s.backward()
    entries = [each for linear in s.linears for each in linear.queue._entries]
    held = [weakref.ref(each) for entry in entries for each in entry.operands if each is not s.sizes]
    assert held
    owned = {weight.data_ptr() for weight in s.weights}
    assert not owned & {each.data_ptr() for entry in entries for each in entry.operands}
    del entries
    s.module.backward_dw()
    assert not [ref for ref in held if ref() is not None and ref() is not s.dy and ref() is not s.probs]


@pytest.mark.rule("DLY-7")
@pytest.mark.parametrize("listed", [False, True])
def test_weights_skip_the_post_hook_of_wrappers(listed: bool) -> None:
    """The attribute survives everything that makes new Parameters; biases do not have it."""
    layer = nn.GroupedLinear(2, 3, 4, delay_wgrad_compute=True, single_grouped_weight=not listed)
    meta = nn.GroupedLinear(2, 3, 4, delay_wgrad_compute=True, single_grouped_weight=not listed, device="meta")
    assigned = copy.deepcopy(layer)
    assigned.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)
    for made in (layer, copy.deepcopy(layer), meta.to_empty(device="cpu"), layer.to(torch.bfloat16), assigned):
        for name, parameter in made.named_parameters():
            assert getattr(parameter, "skip_backward_post_hook", False) is name.startswith("weight"), name
    plain = nn.GroupedLinear(2, 3, 4)
    assert not any(hasattr(each, "skip_backward_post_hook") for each in plain.parameters())


@pytest.mark.rule("DLY-9", "GRP-10", "TE #3019")
@pytest.mark.parametrize("form", MODULES)
def test_all_empty_sizes_give_zeros_and_fire_hooks(form: str) -> None:
    s = setup(form, False, delay=True, case="all_empty")
    fired: list[int] = []
    for linear in s.linears:
        linear.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append(1))
    s.backward()
    s.module.backward_dw()
    for weight in s.weights:
        asserts.zero(weight.grad)
    assert len(fired) == len(s.linears)


@pytest.mark.rule("GRD-9", "MAT-10", "DLY-9", "TE #3400")
@pytest.mark.parametrize("case", [CASE, "all_empty"])
@pytest.mark.parametrize("single", [False, True])
def test_biases_never_wait(single: bool, case: str) -> None:
    """Bias gradients are computed in the main backward, even if there are no rows."""
    s = setup("GroupedLinear", True, case=case)
    layer = nn.GroupedLinear(len(s.sizes), 16, 24, delay_wgrad_compute=True, single_grouped_bias=single)
    layer(leaf(s.x), s.sizes).backward(s.dy[:, :24].contiguous())
    assert all(getattr(layer, name).grad is not None for name in layer.bias_names)
    assert all(each.grad is None for each in parameters_of(layer))
    layer.backward_dw()
    assert all(each.grad is not None for each in parameters_of(layer))


def _train(accumulate: bool, delay: bool) -> tuple[list[float], list[Any]]:
    """(losses, weights at the end) of 16 steps in which a hook clears the gradient, as a wrapper does."""
    s = setup("GroupedMLP", False, accumulate=accumulate, delay=delay, case="jagged")
    masters = [weight.detach().clone() for weight in s.weights]
    optimizer = torch.optim.Adam(masters, lr=1e-2)
    buffers = main_grads(s.weights, 0.0) if accumulate else []

    def collect() -> None:
        for at, (weight, master) in enumerate(zip(s.weights, masters, strict=True)):
            master.grad = buffers[at].view(weight.shape).clone() if accumulate else weight.grad
            weight.grad = None
            if accumulate:
                buffers[at].zero_()

    if delay:
        s.linears[0].register_wgrad_accumulation_and_reduce_hooks(collect)
    losses = []
    for _ in range(16):
        loss = s.run(leaf(s.x)).square().mean()
        losses.append(float(loss.detach()))
        loss.backward()
        s.module.backward_dw() if delay else collect()
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(s.weights, masters, strict=True):
                weight.copy_(master)
    return losses, [weight.detach() for weight in s.weights]


@pytest.mark.rule("DLY-3", "DLY-6")
@pytest.mark.parametrize("accumulate", [False, True])
def test_adam_with_hooks_that_clear_the_gradient(accumulate: bool) -> None:
    losses, weights = _train(accumulate, False)
    assert losses[-1] < losses[0] / 2, losses
    delayed_losses, delayed_weights = _train(accumulate, True)
    assert delayed_losses == losses
    for got, expected in zip(delayed_weights, weights, strict=True):
        asserts.bitwise(got, expected)
