"""How fast do models of Hugging Face transformers train and generate with our experts, beside the library's own?

    python benchmarks/bench_transformers.py                                     # on a GPU
    python benchmarks/bench_transformers.py --models olmoe_1b_7b --optimizer adamw --json out.json
    python benchmarks/bench_transformers.py --what generate --models qwen3_30b_a3b
    python benchmarks/bench_transformers.py --device cpu --tiny                 # that it runs

Weights are random, bfloat16, made on the device; nothing is downloaded. All candidates run one model object in turns:
its experts implementation, recipe and compiled decoder layers are switched before each step, so weights, attention and
loss are the same. A step is forward and backward of a language-model loss, and with `--optimizer adamw` a fused AdamW
step whose states are bfloat16. OLMoE runs whole, the others with as many layers as the memory is estimated to hold. A
sample is the wall time of a finished step; the experts alone are one module on the same number of tokens, timed by
events on a GPU, and their share is that time by the number of layers over the time of the step. "compiled" means
decoder layers under `torch.compile` in training, and the static cache, which the library compiles, in generation.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import torch_bridge
from benchmarks import harness
from grouped_core.recipes import Recipe
from torch_bridge.integrations.transformers import NAME, prepare, register, update_scaling

GIB = 1 << 30


@dataclass(frozen=True)
class Shape:
    """A model: the class of its configuration, and the sizes in it that are not the class's own."""

    name: str
    config: str
    sizes: dict[str, int]
    layers: int

    def configuration(self, layers: int) -> Any:
        kind = getattr(transformers, self.config)
        return kind(num_hidden_layers=layers, pad_token_id=0, bos_token_id=1, eos_token_id=2, **self.sizes)


SHAPES = (
    Shape(
        "olmoe_1b_7b",
        "OlmoeConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 50304,
        },
        16,
    ),
    Shape(
        "qwen3_30b_a3b",
        "Qwen3MoeConfig",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "intermediate_size": 6144,
            "decoder_sparse_step": 1,
        },
        48,
    ),
    Shape(
        "mixtral_8x7b",
        "MixtralConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
        },
        32,
    ),
    Shape(
        "gpt_oss_20b",
        "GptOssConfig",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 201088,
        },
        24,
    ),
)
TINY = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "head_dim": 32,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
"""Sizes of `--tiny`, where a shape has them."""


@dataclass(frozen=True)
class Candidate:
    """What is switched on the model before a step."""

    implementation: str
    recipe: Recipe | None = None
    compiled: bool = False


FAST = torch_bridge.FP8Delayed.replace(name="FP8Delayed, fast", accumulate="fast")
"""Sums of forward stay in the tensor cores, which round them to fewer bits (docs/numerics.md)."""

CANDIDATES: dict[str, Candidate] = {
    "grouped_mm": Candidate("grouped_mm"),
    "grouped_mm, compiled": Candidate("grouped_mm", compiled=True),
    "ours": Candidate(NAME),
    "ours, compiled": Candidate(NAME, compiled=True),
    **{
        f"ours, {recipe.name}": Candidate(NAME, recipe)
        for recipe in (torch_bridge.FP8Block, torch_bridge.FP8Delayed, FAST, torch_bridge.MXFP8)
    },
    **{
        f"ours, {recipe.name}, compiled": Candidate(NAME, recipe, compiled=True)
        for recipe in (torch_bridge.FP8Block, torch_bridge.FP8Delayed)
    },
}
DEFAULT = {
    "train": list(CANDIDATES),
    "generate": [name for name, each in CANDIDATES.items() if each.recipe is None],
}


@dataclass(frozen=True)
class Line:
    """One row of the table.

    Attributes:
        layers: of the model, of its whole number. timing: of a step, or of one call of `generate`.
        peak_gib: most memory that was allocated during a step, weights included. experts_us: forward and backward (in
            generation, forward) of one experts module alone. share: of all experts in the step.
    """

    model: str
    what: str
    candidate: str
    layers: str
    tokens: int
    timing: harness.Timing | None = None
    peak_gib: float | None = None
    experts_us: float | None = None
    share: float | None = None
    skipped: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.timing is None else self.tokens / self.timing.median_us * 1e6


class Bench:
    """A model whose experts are switched between candidates."""

    def __init__(self, shape: Shape, layers: int, options: argparse.Namespace) -> None:
        self.shape, self.layers, self.options, self.device = shape, layers, options, options.device
        with torch.device(self.device):
            self.model: Any = transformers.AutoModelForCausalLM.from_config(
                shape.configuration(layers), dtype=torch.bfloat16
            )
        generator = torch.Generator(device=self.device).manual_seed(0)
        with torch.no_grad():
            for each in self.model.parameters():
                if each.dim() > 1:
                    each.normal_(std=0.02, generator=generator)
        self.plain = [layer.forward for layer in self.blocks]
        self.faster = [torch.compile(forward) for forward in self.plain]
        self.functions = {recipe: self._registered(recipe) for recipe in (None, *_plain_recipes())}
        self.states: dict[Recipe, list[Any]] = {}
        shape_of_ids = (options.batch, options.length)
        self.ids = torch.randint(3, shape.sizes["vocab_size"], shape_of_ids, generator=generator, device=self.device)
        self.optimizer = None
        if options.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    @property
    def blocks(self) -> Any:
        return self.model.model.layers

    @property
    def experts(self) -> list[Any]:
        return [each for each in self.model.modules() if hasattr(each, "is_transposed") and hasattr(each, "down_proj")]

    @staticmethod
    def _registered(recipe: Recipe | None) -> Any:
        """The function of a registration; kept, so that graphs are compiled once for each."""
        register(recipe=recipe)
        return ALL_EXPERTS_FUNCTIONS[NAME]

    def switch(self, candidate: Candidate) -> None:
        """Makes the model that of a candidate."""
        recipe = candidate.recipe
        for each in self.experts:
            if hasattr(each, NAME):
                delattr(each, NAME)
        if recipe is not None and recipe.delayed:
            if recipe not in self.states:
                prepare(self.model, recipe=recipe)
                self.states[recipe] = [getattr(each, NAME) for each in self.experts]
            for each, state in zip(self.experts, self.states[recipe], strict=True):
                setattr(each, NAME, state)
        if candidate.implementation == NAME:
            ALL_EXPERTS_FUNCTIONS[NAME] = self.functions[None if recipe is not None and recipe.delayed else recipe]
        self.model.set_experts_implementation(candidate.implementation)
        for layer, forward in zip(self.blocks, self.faster if candidate.compiled else self.plain, strict=True):
            layer.forward = forward

    def train(self, candidate: Candidate) -> harness.Thunk:
        """One training step."""

        def step(_: int) -> None:
            self.switch(candidate)
            self.model.train()
            self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()
            if self.optimizer is not None:
                self.optimizer.step()
            if candidate.recipe is not None and candidate.recipe.delayed:
                update_scaling(self.model)
            self.model.zero_grad(set_to_none=True)

        return step

    def generate(self, candidate: Candidate) -> harness.Thunk:
        """Greedy generation from prompts of the same length."""
        prompt = self.ids[:, : self.options.prompt]
        cache = {"cache_implementation": "static"} if candidate.compiled else {}
        count = self.options.new_tokens

        def call(_: int) -> None:
            self.switch(Candidate(candidate.implementation, candidate.recipe))
            self.model.eval()
            self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                **cache,
            )

        return call

    def alone(self, candidate: Candidate, tokens: int, *, backward: bool) -> harness.Thunk:
        """The first experts module on random tokens."""
        module, sizes = self.experts[0], self.shape.sizes
        count = sizes.get("num_experts") or sizes["num_local_experts"]
        generator = torch.Generator(device=self.device).manual_seed(1)
        options = {"generator": generator, "device": self.device}
        x = torch.randn(tokens, sizes["hidden_size"], dtype=torch.bfloat16, **options).requires_grad_(backward)
        ids = torch.rand(tokens, count, **options).topk(sizes["num_experts_per_tok"], dim=1).indices
        weights = torch.rand(ids.shape, **options).to(torch.bfloat16).requires_grad_(backward)
        dy = torch.randn(tokens, sizes["hidden_size"], dtype=torch.bfloat16, **options)
        leaves = [x, weights, *[each for each in module.parameters() if each.requires_grad]]

        def call(_: int) -> None:
            self.switch(candidate)
            with torch.set_grad_enabled(backward):
                y = module(x, ids, weights)
            if backward:
                torch.autograd.grad(y, leaves, dy)

        return call


def _plain_recipes() -> list[Recipe]:
    """Recipes of the candidates that need no state; one that does is given by `prepare`."""
    return [each.recipe for each in CANDIDATES.values() if each.recipe is not None and not each.recipe.delayed]


def finished_clock(thunk: harness.Thunk, index: int, sets: int) -> float:
    """Wall time of one finished call in microseconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter_ns()
    thunk(index % sets)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter_ns() - start) / 1e3


def fitting_layers(shape: Shape, options: argparse.Namespace) -> int:
    """As many layers as weights, gradients, states of the optimizer and kept rows are estimated to leave room for."""
    if options.layers:
        return min(options.layers, shape.layers)
    if options.device == "cpu" or shape.name == "olmoe_1b_7b":
        return shape.layers
    counts = []
    for layers in (1, 2):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(shape.configuration(layers), dtype=torch.bfloat16)
        counts.append(sum(each.numel() for each in model.parameters()))
    training = "train" in options.what
    per_parameter = 2 + (2 + (4 if options.optimizer == "adamw" else 0) if training else 0)
    tokens, sizes = options.batch * options.length, shape.sizes
    width = sizes.get("moe_intermediate_size") or sizes["intermediate_size"]
    # What the library's own path keeps of rows: six copies of hidden size, eight of expert width; and for the loss,
    # logits in bfloat16, in float32, and their gradient.
    rows = 2 * tokens * sizes["num_experts_per_tok"] * (6 * sizes["hidden_size"] + 8 * width) if training else 0
    of_loss = 10 * tokens * sizes["vocab_size"] if training else 0
    room = 0.9 * torch.cuda.mem_get_info()[0] - of_loss - per_parameter * (2 * counts[0] - counts[1])
    return max(1, min(shape.layers, int(room / (per_parameter * (counts[1] - counts[0]) + rows))))


def _peak(thunk: harness.Thunk) -> float | None:
    """GiB that were allocated at most during a call."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    thunk(0)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / GIB


def _usable(
    thunks: dict[str, harness.Thunk], calls: int
) -> tuple[dict[str, harness.Thunk], dict[str, float | None], dict[str, str]]:
    """(those that run, their peak memory, reasons of the others), after calls that compile and fill caches."""
    usable, peaks, skipped = {}, {}, {}
    for name, thunk in thunks.items():
        try:
            for i in range(calls):
                thunk(i)
            peaks[name] = _peak(thunk)
            usable[name] = thunk
        except (NotImplementedError, ImportError, torch.OutOfMemoryError) as reason:
            skipped[name] = f"{type(reason).__name__}: {str(reason).splitlines()[0]}"
    return usable, peaks, skipped


def bench(shape: Shape, what: str, names: list[str], options: argparse.Namespace) -> list[Line]:
    """All candidates on one model."""
    layers = fitting_layers(shape, options)
    made = Bench(shape, layers, options)
    training = what == "train"
    build: Callable[[Candidate], harness.Thunk] = made.train if training else made.generate
    usable, peaks, skipped = _usable({name: build(CANDIDATES[name]) for name in names}, 3 if training else 2)
    timings = harness.measure(usable, clock=finished_clock, rounds=options.steps, warmup=1, budget_s=1e9)
    batch = options.batch
    tokens, at_once = (batch * options.length,) * 2 if training else (batch * options.new_tokens, batch)
    single = {name: made.alone(CANDIDATES[name], at_once, backward=training) for name in usable}
    clock = finished_clock if options.device == "cpu" else harness.cuda_clock
    alone = harness.measure(single, clock=clock, rounds=20, budget_s=options.budget)
    steps = 1 if training else options.new_tokens  # calls of each experts module
    lines = []
    for name in names:
        label = (shape.name, what, name, f"{layers} of {shape.layers}", tokens)
        if name in skipped:
            lines.append(Line(*label, skipped=skipped[name]))
            continue
        timing, each = timings[name], alone[name].median_us
        share = None if CANDIDATES[name].compiled else min(1.0, each * layers * steps / timing.median_us)
        lines.append(Line(*label, timing, peaks[name], each, share))
    return lines


def table(lines: list[Line]) -> str:
    """Fixed-width text, with each candidate's speed over that of `grouped_mm`."""
    head = f"{'model':<15}{'what':<9}{'layers':<10}{'candidate':<22}{'ms':>9}{'+-':>5}{'tokens/s':>11}{'ratio':>7}"
    head += f"{'peak GiB':>10}{'experts us':>12}{'ratio':>7}{'share':>7}"
    found = [head, "-" * len(head)]
    first = next((each for each in lines if each.candidate == "grouped_mm" and each.timing is not None), None)
    for each in lines:
        left = f"{each.model:<15}{each.what:<9}{each.layers:<10}{each.candidate:<22}"
        if each.timing is None or each.experts_us is None:
            found.append(f"{left}  skipped: {each.skipped}")
            continue
        ratios = ("", "")
        if first is not None and first.timing is not None and first.experts_us is not None:
            ratios = (
                f"{first.timing.median_us / each.timing.median_us:.2f}",
                f"{first.experts_us / each.experts_us:.2f}",
            )
        peak = "" if each.peak_gib is None else f"{each.peak_gib:.1f}"
        share = "" if each.share is None else f"{each.share:.0%}"
        found.append(
            f"{left}{each.timing.median_us / 1e3:>9.1f}{each.timing.spread:>5.0%}{each.tokens_per_s:>11.0f}"
            f"{ratios[0]:>7}{peak:>10}{each.experts_us:>12.1f}{ratios[1]:>7}{share:>7}"
        )
    return "\n".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--models", nargs="+", choices=[each.name for each in SHAPES])
    parser.add_argument("--what", nargs="+", choices=list(DEFAULT), default=list(DEFAULT))
    parser.add_argument("--candidates", nargs="+", choices=list(CANDIDATES))
    parser.add_argument("--layers", type=int, help="of every model; as many as fit without it")
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence in training")
    parser.add_argument("--prompt", type=int, default=128, help="tokens before generation")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--optimizer", choices=("none", "adamw"), default="none")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each candidate")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for the experts alone, per model")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # one graph for each candidate
    transformers.logging.set_verbosity_error()
    shapes = [each for each in SHAPES if not options.models or each.name in options.models]
    if options.tiny:
        options.batch, options.length, options.prompt, options.new_tokens, options.steps = 2, 32, 8, 4, 3
        small = [{name: TINY.get(name, size) for name, size in each.sizes.items()} for each in shapes]
        shapes = [Shape(each.name, each.config, sizes, 2) for each, sizes in zip(shapes, small, strict=True)]
    lines = []
    for shape in shapes:
        for what in options.what:
            block = bench(shape, what, options.candidates or DEFAULT[what], options)
            print(table(block), flush=True)
            lines += block
            torch.compiler.reset()
            gc.collect()  # modules and their hooks are cycles
            if options.device == "cuda":
                torch.cuda.empty_cache()
    print({**harness.machine(), "transformers": transformers.__version__})
    if options.json:
        rows = [{**asdict(each), "tokens_per_s": each.tokens_per_s} for each in lines]
        harness.save([], options.json, transformers=transformers.__version__, lines=rows)


if __name__ == "__main__":
    main()
