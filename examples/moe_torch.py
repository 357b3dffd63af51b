"""Trains a small mixture-of-experts language model in PyTorch, with the features that a training framework needs.

    python examples/moe_torch.py                            # about two minutes on two CPU cores
    python examples/moe_torch.py --main-grad --delay-wgrad --offload --graph --device cuda
    python examples/moe_torch.py --compare --steps 12       # each switch alone and all together: losses, time, memory

The text is the source of the Python standard library, as in train_lm.py. The switches change where weight gradients are
written and when they are computed, where activations are kept, and how a step is launched. They do not change the
arithmetic, except that `--main-grad` sums the gradients of microbatches in float32 whatever the dtype of the weights.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from lm import data
from lm.errors import UserError
from lm.torch_model import HEAD_WIDTH, LanguageModel
from torch import Tensor
from tqdm import tqdm

from torch_bridge import nn
from torch_bridge.offload import cpu_offload

WARMUP = 3
"""Number of steps that are not timed; with --graph they run eagerly, and the next step is captured."""
OFFLOADED = ("grouped_x", "grouped_fc1")
"""The tensors that --offload moves: the rows that the experts read, and their pre-activations."""


@dataclass(frozen=True)
class Switches:
    """Options that change how a step runs and not what it computes."""

    main_grad: bool = False
    delay_wgrad: bool = False
    offload: bool = False
    graph: bool = False

    def __str__(self) -> str:
        return " + ".join(name for name, on in vars(self).items() if on) or "none"


class Result(NamedTuple):
    """Results of a run: bits per byte of each step, tokens per second, and peak GPU memory."""

    losses: list[float]
    tokens_per_second: float
    peak_mib: float | None


class Masters:
    """AdamW on float32 master weights; the gradient is `main_grad` if a parameter has one, else `.grad`."""

    def __init__(self, model: torch.nn.Module, rate: Tensor) -> None:
        self._parameters: list[Any] = list(model.parameters())
        self._copies = [
            p.detach() if p.dtype == torch.float32 else p.detach().float() for p in self._parameters
        ]  # float32 parameters share memory with their master weight
        self._adam = torch.optim.AdamW(
            self._copies, lr=rate, betas=(0.9, 0.98), weight_decay=0.1, foreach=rate.is_cuda, capturable=rate.is_cuda
        )

    def step(self) -> None:
        """Updates the parameters from the gradients and clears the gradients."""
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            copy.grad = parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(self._copies, 1.0)
        self._adam.step()
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            if parameter.dtype != torch.float32:
                parameter.detach().copy_(copy)
            parameter.grad = copy.grad = None


class Training:
    """One run: the model, the optimizer, and a step whose kernels are launched one by one or replayed as a graph."""

    def __init__(self, options: argparse.Namespace, switches: Switches) -> None:
        torch.manual_seed(options.seed)
        self.options, self.switches = options, switches
        self.device = torch.device(options.device)
        self.dtype = getattr(torch, options.dtype)
        with self.device:
            model = LanguageModel(
                options.width,
                options.layers,
                options.experts,
                options.top_k,
                accumulate_into_main_grad=switches.main_grad,
                delay_wgrad_compute=switches.delay_wgrad,
            )
        self.model = model.to(self.dtype)
        self.experts = [each for each in self.model.modules() if isinstance(each, nn.GroupedMLP)]
        self.weights: list[Any] = [p for each in self.experts for p in each.parameters()]
        if switches.main_grad:
            for weight in self.weights:
                weight.main_grad = torch.empty(weight.shape, device=self.device)
        self.rate = torch.zeros((), device=self.device)
        self.optimizer = Masters(self.model, self.rate)
        shape = (options.microbatches, options.batch, options.length + 1)
        self.text = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.bits = torch.zeros((), device=self.device)

    def _around(self) -> Any:
        """The offloading context of one block."""
        if not self.switches.offload:
            return nullcontext()
        return cpu_offload(names=OFFLOADED, min_numel=0, retain_pinned=self.switches.graph)

    def _step(self) -> Tensor:
        """Runs forward and backward of each microbatch, then the optimizer; returns bits per byte."""
        total = torch.zeros((), device=self.device)
        count = len(self.text)
        # The outer context lets a captured graph wait for copies at its end, and microbatches share its pinned memory.
        with cpu_offload(enabled=False) if self.switches.offload else nullcontext():
            for at, text in enumerate(self.text):
                for weight in self.weights:
                    weight.overwrite_main_grad = at == 0
                nats, balance = self.model(text, self._around)
                ((nats + balance) / count).backward()
                total += nats.detach() / count
                for each in reversed(self.experts):
                    each.backward_dw()
        self.optimizer.step()
        return total / math.log(2)

    def step(self, at: int, text: Any) -> Tensor:
        """Runs step number `at`."""
        last = max(self.options.steps, WARMUP + 1)
        warm = min(1.0, (at + 1) / max(1, last // 10))
        self.rate.fill_(self.options.learning_rate * warm * 0.5 * (1.02 + 0.98 * math.cos(math.pi * at / last)))
        self.text.copy_(torch.from_numpy(text))
        if not (self.switches.graph and self.device.type == "cuda"):
            return self._step()
        if at < WARMUP:  # on a side stream, as graph capture requires
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                bits = self._step()
            torch.cuda.current_stream().wait_stream(stream)
            return bits
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.bits = self._step()
        self.graph.replay()
        return self.bits.clone()


def train(options: argparse.Namespace, switches: Switches, text: data.Text) -> Result:
    """Trains for all steps and shows the progress in one line."""
    on_gpu = options.device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = Training(options, switches)
    batches = data.Batches(text.train, options.microbatches * options.batch, options.length, options.seed)
    losses: list[float] = []
    seconds = []
    with tqdm(total=options.steps, unit="step", desc=f"training ({switches})", file=sys.stderr) as bar:
        for at in range(options.steps):
            drawn = batches.draw().reshape(run.text.shape)
            start = time.perf_counter()
            losses.append(float(run.step(at, drawn)))
            seconds.append(time.perf_counter() - start)
            bar.set_postfix_str(f"{losses[-1]:.3f} bits/byte", refresh=False)
            bar.update()
    timed = sorted(seconds[WARMUP + 1 :] or seconds)
    tokens = options.microbatches * options.batch * options.length
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None
    return Result(losses, tokens / timed[len(timed) // 2], peak)


def draw(path: Path, results: dict[Switches, Result]) -> None:
    """Draws the loss curves."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for switches, result in results.items():
        axes.plot(range(1, len(result.losses) + 1), result.losses, label=str(switches), alpha=0.7)
    axes.set(xlabel="step", ylabel="bits per byte", title="Loss")
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def table(results: dict[Switches, Result], dtype: str) -> str:
    """One line per run. Losses are compared bit by bit with the first run that sums gradients in the same dtype."""
    lines = [f"{'switches':<44}{'last loss':>10}{'losses':>12}{'tokens/s':>11}{'peak MiB':>10}"]
    firsts: dict[str, list[float]] = {}
    for switches, result in results.items():
        added_in = "float32" if switches.main_grad else dtype
        first = firsts.setdefault(added_in, result.losses)
        apart = max(abs(a - b) for a, b in zip(result.losses, first, strict=True))
        same = added_in if result.losses is first else "equal" if result.losses == first else f"{apart:.1e} off"
        peak = "-" if result.peak_mib is None else f"{result.peak_mib:.0f}"
        lines.append(f"{switches!s:<44}{result.losses[-1]:>10.4f}{same:>12}{result.tokens_per_second:>11.0f}{peak:>10}")
    if len(results) > 1:
        lines.append(f"equal: the losses of each step have the bits of the first run, marked {' or '.join(firsts)}")
    if len(firsts) > 1:
        lines.append(
            f"main_grad adds the gradients of microbatches in float32, the other runs in {dtype}: other roundings, "
            "other losses,\nso each kind is compared with its own first run"
        )
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--main-grad", action="store_true", help="kernels add weight gradients to float32 main_grad buffers")
    add("--delay-wgrad", action="store_true", help="compute weight gradients in backward_dw")
    add("--offload", action="store_true", help="keep the experts' rows in pinned host memory until backward")
    add("--graph", action="store_true", help="capture the step as a CUDA graph (on a GPU)")
    add("--compare", action="store_true", help="run without switches, with each alone, and with all")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16"), help="weight dtype (default: float32 on the CPU, else bfloat16)")
    add("--text", metavar="PATH", help="file or folder to learn from (default: the Python standard library)")
    for name, default in (
        *(("steps", 200), ("experts", 8), ("top-k", 2), ("width", 128), ("layers", 3)),
        *(("batch", 4), ("length", 256), ("microbatches", 2)),
    ):
        add(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    add("--learning-rate", type=float, default=4e-3, help="peak learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    add("--output", metavar="DIR", default="demo-output", help="folder for the loss curve (default: %(default)s)")
    options = parser.parse_args(argv)
    for name in ("steps", "experts", "top_k", "width", "layers", "batch", "length", "microbatches"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)} is less than 1")
    if options.top_k > options.experts:
        raise UserError(f"--top-k {options.top_k} is more than --experts {options.experts}")
    if options.width % HEAD_WIDTH:
        raise UserError(f"--width {options.width} is not a multiple of {HEAD_WIDTH}, the width of an attention head")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no GPU here")
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    return options


def run(argv: list[str] | None) -> None:
    options = parse_arguments(argv)
    text = data.load(options.text)
    if len(text.train) <= options.length:
        raise UserError(f"the text has {len(text.train)} bytes to learn from, too few for --length {options.length}")
    chosen = Switches(options.main_grad, options.delay_wgrad, options.offload, options.graph)
    variants = [chosen]
    if options.compare:
        alone = [replace(Switches(), **{name: True}) for name in vars(chosen)]
        variants = [Switches(), *alone, Switches(True, True, True, True)]
    if options.device == "cpu" and any(each.graph for each in variants):
        print("moe_torch: there is no CUDA graph on the CPU, steps are launched one by one", file=sys.stderr)
    results = {each: train(options, each, text) for each in variants}
    print(table(results, options.dtype))
    folder = Path(options.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draw(folder / "moe_torch.png", results)
    except OSError as error:
        raise UserError(f"--output {folder}: {error.strerror}") from None
    print(f"loss curve: {folder / 'moe_torch.png'}")


def main(argv: list[str] | None = None) -> int:
    try:
        run(argv)
    except UserError as error:
        print(f"moe_torch: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("moe_torch: stopped by Ctrl-C", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
