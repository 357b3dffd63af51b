"""Trains a small mixture-of-experts language model on the source of the Python standard library.

    python examples/train_lm.py                      # about three minutes on two CPU cores
    python examples/train_lm.py --text my_book.txt --steps 2000 --checkpoint run1     # and later with --resume
    python examples/train_lm.py --recipe FP8Block   # experts in bfloat16, their GEMMs in 8 bits

At the end it prints how many bits per byte the model needs for held-out text, and how many compressors need for the
same bytes. It continues a prompt, times the same training step with `jax.lax.ragged_dot` (--compare), and draws a
picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from lm import checkpoints, data, report
from lm.errors import UserError
from lm.model import HEAD_WIDTH, LanguageModel, XlaMoE
from tqdm import tqdm

import jax_grouped
from grouped_core import recipes
from jax_grouped.nnx import Scaling, update_scalings

RECIPES = ("BF16", *(name for name, recipe in recipes.RECIPES.items() if recipe.quantized))
SAMPLE_BYTES = 300
TEMPERATURE = 0.7
TIMED_STEPS = 4
FEW_EXPERTS = 16
"""Up to this number of experts the comparison runs unless it is switched off."""
PRIMED_BYTES = 1 << 22
"""At most this much training text is given to a compressor, which takes one second per million bytes."""
INTERRUPTED = 130  # the exit status that shells report after Ctrl-C


# ---- options ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that determine a run's results; a checkpoint resumes only with the same settings."""

    text: str | None
    steps: int
    experts: int
    top_k: int
    width: int
    layers: int
    batch: int
    length: int
    learning_rate: float
    seed: int
    recipe: str | None = None


class Sizes(NamedTuple):
    """Defaults that depend on the device."""

    steps: int
    experts: int
    width: int
    layers: int
    batch: int
    length: int
    learning_rate: float


SIZES = {"cpu": Sizes(1800, 8, 128, 2, 8, 128, 4e-3), "gpu": Sizes(1000, 16, 512, 4, 32, 512, 1e-3)}
"""Minutes of work for two cores; on a GPU, enough work per step to keep it busy."""


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _number(kind: Callable[[str], Any], low: float, high: float) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r}, wanted a number from {low:g} to {high:g}")
        return value

    return parse


def parse_arguments(argv: list[str] | None) -> tuple[Settings, argparse.Namespace]:
    """Returns the settings of the run and the other options."""
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    whole = partial(_number, int)
    add = parser.add_argument

    def size(name: str, kind: Callable[[str], Any], meaning: str) -> None:
        cpu, gpu = (getattr(sizes, name.replace("-", "_")) for sizes in SIZES.values())
        add(f"--{name}", type=kind, help=f"{meaning} (default: {cpu}, on a GPU {gpu})")

    add("--text", metavar="PATH", help="file or folder to learn from (default: the Python standard library)")
    size("steps", whole(1, 1e7), "training steps")
    size("experts", whole(1, 1024), "experts per layer")
    add("--top-k", type=whole(1, 32), default=2, help="experts per byte (default: %(default)s)")
    size("width", whole(HEAD_WIDTH, 8192), "width of the residual stream")
    size("layers", whole(1, 128), "transformer blocks")
    size("batch", whole(1, 4096), "text windows per step")
    size("length", whole(2, 16384), "bytes per window")
    size("learning-rate", _number(float, 1e-8, 1), "peak learning rate")
    add("--seed", type=whole(0, 2**31 - 1), default=0, help="seed of weights, batches, sample (default: %(default)s)")
    add("--recipe", choices=RECIPES, help="recipe of the experts' GEMMs (default: float32)")
    add("--checkpoint", metavar="DIR", help="folder for checkpoints (default: none are written)")
    add("--save-every", type=whole(1, 1e7), default=200, help="steps between checkpoints (default: %(default)s)")
    add("--resume", action="store_true", help="continue from the newest checkpoint in --checkpoint")
    add("--output", metavar="DIR", default="demo-output", help="folder for results (default: %(default)s)")
    add("--prompt", default="def main(", help="text to continue (default: %(default)r)")
    add(
        "--compare",
        action=argparse.BooleanOptionalAction,
        help=f"time the step with jax.lax.ragged_dot too (default: with up to {FEW_EXPERTS} experts)",
    )
    options = parser.parse_args(argv)
    for name, value in SIZES["cpu" if jax.default_backend() == "cpu" else "gpu"]._asdict().items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    settings = Settings(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Settings)})
    if settings.top_k > settings.experts:
        raise UserError(f"--top-k {settings.top_k} is more than --experts {settings.experts}")
    if settings.width % HEAD_WIDTH:
        raise UserError(f"--width {settings.width} is not a multiple of {HEAD_WIDTH}, the width of an attention head")
    if options.compare is None:
        options.compare = settings.experts <= FEW_EXPERTS
    if options.resume and not options.checkpoint:
        raise UserError("--resume needs --checkpoint DIR, the folder of the run to continue")
    if not options.prompt:
        raise UserError("--prompt is empty; give at least one character to continue")
    return settings, options


# ---- training --------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """The arrays that a training step changes."""

    params: nnx.State
    optimizer: optax.OptState
    scaling: nnx.State
    """Delayed scaling state; its next value is returned in place of its gradient."""
    keys: nnx.State
    """Keys of recipes that round stochastically."""


class Program(NamedTuple):
    """The initial state and the compiled functions of one model."""

    state: State
    train: Callable[[State, jax.Array], tuple[State, jax.Array]]
    evaluate: Callable[[State, jax.Array], tuple[jax.Array, jax.Array]]
    next_byte: Callable[[State, jax.Array, jax.Array, jax.Array], jax.Array]


def build(settings: Settings, **model_options: Any) -> Program:
    """Creates a model with its optimizer, and the functions that train, evaluate and sample it."""
    seed = settings.seed
    model = LanguageModel(
        *(settings.width, settings.layers, settings.experts, settings.top_k),
        recipe=None if settings.recipe is None else getattr(jax_grouped, settings.recipe),
        rngs=nnx.Rngs(seed, rounding=seed + 1),  # a separate seed, so that parameters are the same with every recipe
        **model_options,
    )
    structure, params, scaling, keys = nnx.split(model, nnx.Param, Scaling, nnx.RngState)
    warmup = min(max(1, settings.steps // 10), 200)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, warmup, max(settings.steps, warmup + 1), 0.02 * settings.learning_rate
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.1))

    def loss(
        params: nnx.State, scaling: nnx.State, keys: nnx.State, text: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, nnx.State]]:
        """Returns the loss; then bits per byte, rows per expert [layers, experts], and the next step's keys."""
        model = nnx.merge(structure, params, scaling, keys, copy=True)  # a copy, because keys change
        logits, reports = model(text[:, :-1])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:].astype(jnp.int32)).mean()
        balance = sum(aux.aux_loss for aux in reports)
        load = jnp.stack([aux.load for aux in reports])
        return nats + balance, (nats / math.log(2), load, nnx.state(model, nnx.RngState))

    @partial(jax.jit, donate_argnums=0)
    def train(state: State, text: jax.Array) -> tuple[State, jax.Array]:
        (gradients, scaling), (bits, _, keys) = jax.grad(loss, argnums=(0, 1), has_aux=True)(
            state.params, state.scaling, state.keys, text
        )
        updates, moments = optimizer.update(gradients, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), moments, update_scalings(scaling), keys), bits

    @jax.jit
    def evaluate(state: State, text: jax.Array) -> tuple[jax.Array, jax.Array]:
        bits, load, _ = loss(state.params, state.scaling, state.keys, text)[1]
        return bits, load

    @jax.jit
    def next_byte(state: State, text: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
        logits, _ = nnx.merge(structure, state.params, state.scaling, state.keys)(text)
        return jax.random.categorical(key, logits[0, last] / TEMPERATURE)

    return Program(State(params, optimizer.init(params), scaling, keys), train, evaluate, next_byte)


class Interrupt:
    """Makes Ctrl-C a request to stop after the current step; a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class Run:
    """A training run: the state, the position in the text, and the loss of each step so far."""

    def __init__(self, settings: Settings, text: data.Text) -> None:
        self.settings = settings
        self.program = build(settings)
        self.state = self.program.state
        self.batches = data.Batches(text.train, settings.batch, settings.length, settings.seed)
        self.losses: list[float] = []

    def notes(self) -> dict[str, Any]:
        """The data of a checkpoint besides the arrays, which include Adam's step count. The sample has its own seed."""
        settings = dataclasses.asdict(self.settings)
        return {"settings": settings, "position": self.batches.position, "losses": self.losses}

    def resume(self, saved: checkpoints.Checkpoints) -> None:
        """Continues from the newest checkpoint, which must have the same settings."""
        notes = saved.notes()
        ours = dataclasses.asdict(self.settings)
        try:
            theirs = dict(notes["settings"])
            losses = [float(bits) for bits in notes["losses"]]
            position = dict(notes["position"])
        except (KeyError, TypeError, ValueError) as error:
            raise saved.unreadable(error) from None
        other = [f"{n} {theirs.get(n)!r} there, {ours[n]!r} here" for n in ours if theirs.get(n) != ours[n]]
        if other:
            raise UserError(f"--resume: the checkpoint in {saved.folder} is of another run: {'; '.join(other)}")
        self.state = saved.state(self.state)
        try:
            self.batches.position = position
        except (KeyError, TypeError, ValueError) as error:
            raise saved.unreadable(error) from None
        self.losses = losses

    def train(self, saved: checkpoints.Checkpoints | None, save_every: int) -> float:
        """Trains to the last step or to Ctrl-C. Returns tokens per second without compilation (0 if none was timed)."""
        settings = self.settings
        first = len(self.losses)
        seconds = 0.0
        with Interrupt() as interrupt, tqdm(total=settings.steps, initial=first, unit="step", desc="training") as bar:
            while len(self.losses) < settings.steps and not interrupt.asked:
                start = time.perf_counter()
                self.state, bits = self.program.train(self.state, self.batches.draw())
                self.losses.append(float(bits))
                if len(self.losses) > first + 1:  # the first step compiles
                    seconds += time.perf_counter() - start
                bar.set_postfix_str(f"{self.losses[-1]:.2f} bits/byte")
                bar.update()
                if saved and (len(self.losses) % save_every == 0 or len(self.losses) == settings.steps):
                    saved.save(len(self.losses), self.state, self.notes())
            if saved and interrupt.asked:
                saved.save(len(self.losses), self.state, self.notes())
        if interrupt.asked:
            raise KeyboardInterrupt
        timed = len(self.losses) - first - 1
        return timed * settings.batch * settings.length / seconds if timed > 0 else 0.0


# ---- results ---------------------------------------------------------------------------------------------------------


def held_out_loss(run: Run, held_out: np.ndarray) -> tuple[float, np.ndarray]:
    """Bits per byte on the held-out text, and the number of rows per expert there [layers, experts]."""
    windows = data.held_out_windows(held_out, run.settings.length)
    batch = min(run.settings.batch, len(windows))
    total, load = 0.0, 0
    count = len(windows) // batch
    for part in tqdm(np.split(windows[: count * batch], count), unit="batch", desc="held out", leave=False):
        bits, rows = run.program.evaluate(run.state, part)
        total, load = total + float(bits), load + np.asarray(rows)
    return total / count, np.asarray(load)


def sample(run: Run, prompt: bytes) -> bytes:
    """Continues the prompt byte by byte."""
    length = run.settings.length
    text = prompt
    keys = jax.random.split(jax.random.key(run.settings.seed), SAMPLE_BYTES)
    for key in tqdm(keys, unit="byte", desc="sampling", leave=False):
        seen = np.frombuffer(text[-length:], np.uint8)
        window = np.zeros((1, length), np.uint8)  # zeros after the text have no effect: attention is causal
        window[0, : len(seen)] = seen
        text += bytes([int(run.program.next_byte(run.state, window, len(seen) - 1, key))])
    return text


def time_steps(run: Run, compare: bool) -> dict[str, float]:
    """Milliseconds of the same training steps with our GEMMs and with `jax.lax.ragged_dot`, interleaved."""
    programs = {"jax_grouped": run.program}
    if compare:
        programs["jax.lax.ragged_dot"] = build(run.settings, moe=XlaMoE)
    states = {name: jax.tree.map(jnp.copy, run.state) for name in programs}
    best = dict.fromkeys(programs, math.inf)
    for turn in range(1 + TIMED_STEPS):
        text = run.batches.draw()
        for name, program in programs.items():
            start = time.perf_counter()
            states[name], bits = program.train(states[name], text)
            bits.block_until_ready()
            if turn > 0:  # the first turn compiles
                best[name] = min(best[name], 1000 * (time.perf_counter() - start))
    return best


def phase(what: str) -> None:
    """Announces the next task, because some of them take a while."""
    print(f"{what} ...", flush=True)


def finish(run: Run, text: data.Text, tokens_per_s: float, options: argparse.Namespace, began: float) -> None:
    """Evaluates, samples, compares, draws, and prints the results."""
    output = Path(options.output)
    phase("predicting held-out text")
    held_out, load = held_out_loss(run, text.held_out)
    phase("compressing it")
    seen = run.settings.steps * run.settings.batch * run.settings.length
    others = data.bits_per_byte_of_others(text.held_out, text.train[: min(seen, PRIMED_BYTES)])
    phase("continuing the prompt")
    continued = sample(run, options.prompt.encode())
    peer = " and with jax.lax.ragged_dot (--no-compare leaves it out)" if options.compare else ""
    phase(f"timing {1 + TIMED_STEPS} more steps with jax_grouped{peer}")
    step_ms = time_steps(run, options.compare)
    figures = {
        "settings": dataclasses.asdict(run.settings),
        "held_out_bits_per_byte": held_out,
        "others_bits_per_byte": others,
        "tokens_per_s": tokens_per_s,
        "step_ms": step_ms,
        "seconds": time.perf_counter() - began,
        "losses": run.losses,
    }
    try:
        report.picture(output / "training.png", run.losses, held_out, others, load)
        report.write(output, continued, figures)
    except OSError as error:
        raise UserError(f"cannot write the results to {output}: {error.strerror or error}") from None

    print(f"\n{report.printable(continued)}\n")
    print(f"bits per byte on {len(text.held_out):,} held-out bytes of {text.name}")
    for name, bits in {"this model": held_out, **others}.items():
        print(f"  {name:<20}{bits:6.2f}")
    print(f"milliseconds for a training step (best of {TIMED_STEPS})")
    for name, ms in step_ms.items():
        print(f"  {name:<20}{report.three_digits(ms):>6}")
    if not options.compare:
        print(
            f"  jax.lax.ragged_dot: not timed, as it may compute every row with each of {run.settings.experts} experts "
            "(--compare)"
        )
    print(f"{tokens_per_s:,.0f} tokens/s in training, {figures['seconds']:.0f} s in all; files: {output}")


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns the exit status."""
    began = time.perf_counter()
    try:
        settings, options = parse_arguments(argv)
        text = data.load(settings.text)
        for name, part in (("training", text.train), ("held-out", text.held_out)):
            if len(part) <= settings.length + 1:
                raise UserError(f"{len(part)} bytes of {name} text are too few for --length {settings.length}")
        output = Path(options.output)
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output {options.output}: {error.strerror}") from None
        with checkpoints.Checkpoints(options.checkpoint) if options.checkpoint else nullcontext() as saved:
            if saved:
                saved.expect(options.resume)
            run = Run(settings, text)
            size = sum(p.size for p in jax.tree.leaves(run.state.params))
            print(f"{text.name}: {len(text.train):,} bytes to learn from; a model of {size:,} parameters")
            kind = jax.devices()[0].device_kind
            phase(f"compiling a training step, then taking {settings.steps} of them on {kind}")
            if saved and options.resume:
                run.resume(saved)
            tokens_per_s = run.train(saved, options.save_every)
        finish(run, text, tokens_per_s, options, began)
    except UserError as error:
        print(f"train_lm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_lm: stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
