"""The experts of a training framework, run by its own code and by this library, on the CPU.

    python examples/training_frameworks.py torchtitan           # or nemo; `make test-hosts` installs both

The framework builds its module of experts from its own configuration. Rows go through it forward and backward, before
and after the one line that registers the adapter; the module, its Parameters and its call do not change. Printed are
the distance of results and gradients, which both round to bfloat16, and the time of each, which on the CPU says nothing
about GPUs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

EXPERTS, HIDDEN, WIDTH, ROWS, ROUNDS = 8, 256, 512, 1024, 5
Call = Callable[[Any, Tensor, Tensor], Tensor]
"""(module, rows [M, H] sorted by expert, rows of each expert [E]) -> [M, H]."""


def torchtitan() -> tuple[Any, Call, Any]:
    """(its experts, how they are called, our adapter)."""
    from torchtitan.models.common.moe import GroupedExperts

    from torch_bridge.integrations import torchtitan as adapter

    module = GroupedExperts.Config(dim=HIDDEN, hidden_dim=WIDTH, num_experts=EXPERTS).build()
    return module, lambda module, x, counts: module(x, counts), adapter


def nemo() -> tuple[Any, Call, Any]:
    """As `torchtitan`. Its experts take tokens, here of one expert each."""
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.moe.config import MoEConfig
    from nemo_automodel.components.moe.experts import GroupedExperts

    from torch_bridge.integrations import nemo as adapter

    sizes = {"dim": HIDDEN, "inter_dim": WIDTH, "moe_inter_dim": WIDTH, "n_routed_experts": EXPERTS}
    routing = {"n_shared_experts": 0, "n_activated_experts": 1, "n_expert_groups": 1, "n_limited_groups": 1}
    routing |= {"train_gate": True, "gate_bias_update_factor": 0.0, "aux_loss_coeff": 0.0, "route_scale": 1.0}
    config = MoEConfig(**sizes, **routing, score_func="softmax", norm_topk_prob=False, dtype=torch.bfloat16)

    def call(module: Any, x: Tensor, counts: Tensor) -> Tensor:
        ids = torch.repeat_interleave(torch.arange(EXPERTS), counts)[:, None]
        return module(x, torch.ones(len(x), dtype=torch.bool), torch.ones(len(x), 1, dtype=x.dtype), ids)

    return GroupedExperts(config, backend=BackendConfig(experts="torch_mm")), call, adapter


FRAMEWORKS = {"torchtitan": torchtitan, "nemo": nemo}


def run(module: Any, call: Call) -> tuple[list[Tensor], float]:
    """([result, gradient of the rows, gradients of the Parameters], seconds of the quickest round)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, HIDDEN, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(ROWS, HIDDEN, generator=generator).bfloat16()
    counts = torch.full((EXPERTS,), ROWS // EXPERTS)
    found, seconds = [], []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        y = call(module, x, counts)
        found = [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy.to(y.dtype))]
        seconds.append(time.perf_counter() - begin)
    return found, min(seconds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=FRAMEWORKS)
    options = parser.parse_args(argv)
    try:
        module, call, adapter = FRAMEWORKS[options.framework]()
    except ImportError as error:
        print(f"training_frameworks: {options.framework} cannot be imported: {error}", file=sys.stderr)
        return 2
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for each in module.parameters():
            each.normal_(std=HIDDEN**-0.5, generator=generator)
    theirs, their_time = run(module, call)
    with adapter.register() as held:  # the line that switches
        print("replaced:", ", ".join(held.replaced))
        ours, our_time = run(module, call)
    print(f"forward and backward: {options.framework} {1e3 * their_time:.1f} ms, ours {1e3 * our_time:.1f} ms")
    names = ("result", "gradient of the rows", *(f"gradient of {name}" for name, _ in module.named_parameters()))
    for name, own, other in zip(names, theirs, ours, strict=True):
        distance = (own.double() - other.double()).norm() / own.double().norm()
        print(f"{name:<32}{distance:>10.1e} relative distance")
    return 0


if __name__ == "__main__":
    sys.exit(main())
