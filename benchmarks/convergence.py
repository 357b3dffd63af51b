r"""Does a model learn as well with each recipe as with bf16? Trains the demo's model with all, from the same seeds.

    python benchmarks/convergence.py --plot benchmarks/convergence_cpu.png                          # CPU size
    python benchmarks/convergence.py --json gpu.json --plot benchmarks/convergence_gpu.png --width 512 --layers 4 \
      --experts 16 --batch 16 --length 256 --steps 250 --learning-rate 2e-3 --held-out 65536        # GPU size

Runs with one seed start from the same weights and see the same batches. A run that is already in the JSON file is not
repeated, so a sweep that was interrupted can be continued. The seed is not compiled into the program, so each recipe is
compiled once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import jax
import numpy as np
import train_lm
from lm import data

from benchmarks import harness, plots

BASE = "BF16"
CHANGING = {"text", "seed", "recipe"}
"""Settings that are not options of this script."""

ALLOWED = {"FP8Delayed": 0.005, "FP8Current": 0.005, "FP8Block": 0.005, "MXFP8": 0.005, "NVFP4": 0.015}
"""How much a recipe's mean held-out loss may exceed that of `BASE`, as a share of the latter."""


def arguments() -> tuple[train_lm.Settings, argparse.Namespace]:
    """The settings of all runs except seed and recipe, and the other options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    for name, default in (
        ("steps", 250), ("experts", 4), ("top-k", 2), ("width", 128), ("layers", 2), ("batch", 4), ("length", 128),
    ):  # fmt: skip
        add(f"--{name}", type=int, default=default, help="as in the demo (default: %(default)s)")
    add("--learning-rate", type=float, default=1e-3, help="its peak (default: %(default)s)")
    add("--held-out", type=int, default=1 << 15, help="bytes that losses are measured on (default: %(default)s)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the runs of each recipe (default: %(default)s)")
    add("--recipes", nargs="+", choices=train_lm.RECIPES, default=list(train_lm.RECIPES))
    add("--json", type=Path, default=Path("convergence.json"), help="results, read and written (default: %(default)s)")
    add("--plot", type=Path, help="draw the losses of all runs")
    options = parser.parse_args()
    names = {f.name for f in dataclasses.fields(train_lm.Settings)} - CHANGING
    return train_lm.Settings(text=None, seed=0, **{name: getattr(options, name) for name in names}), options


class Results:
    """The finished runs in a JSON file, with losses in bits per byte; all have the same settings and text."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        self.runs: dict[str, dict[str, Any]] = {}
        self.about = about
        if path.exists():
            held = json.loads(path.read_text())
            if held["about"] != about:
                raise SystemExit(f"{path} holds runs of {held['about']}, not of {about}; name another file with --json")
            self.runs = held["runs"]

    def add(self, name: str, run: dict[str, Any]) -> None:
        """Saves a finished run atomically."""
        self.runs[name] = run
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"about": self.about, "machine": harness.machine(), "runs": self.runs}) + "\n")
        part.replace(self.path)


def train(program: train_lm.Program, settings: train_lm.Settings, text: data.Text, held_out: np.ndarray) -> Any:
    """One run: the loss of each step, and the loss on held-out text."""
    start = time.perf_counter()
    state = train_lm.build(settings).state
    batches = data.Batches(text.train, settings.batch, settings.length, settings.seed)
    losses = []
    for _ in range(settings.steps):
        state, bits = program.train(state, batches.draw())
        losses.append(bits)
    parts = np.split(held_out, len(held_out) // settings.batch)
    final = [program.evaluate(state, part)[0] for part in parts]
    return {
        "losses": [round(float(bits), 4) for bits in losses],
        "held_out": float(np.mean(jax.device_get(final), dtype=np.float64)),
        "seconds": round(time.perf_counter() - start, 1),
    }


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Mean held-out losses compared with `BASE`, over the seeds that both have, and the spread between seeds."""
    of: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        recipe, seed = name.split("/")
        of.setdefault(recipe, {})[seed] = run["held_out"]
    lines = ["| recipe | held-out bits per byte | over bf16 | allowed | each seed over bf16 |", "| --- " * 5 + "|"]
    for recipe, losses in of.items():
        beside = of.get(BASE, {})
        seeds = sorted(losses.keys() & beside.keys())
        mean = f"| {recipe} | {np.mean(list(losses.values())):.4f} |"
        if not seeds:
            lines.append(f"{mean} | | |")
            continue
        if recipe == BASE:
            each = np.array([losses[seed] for seed in seeds])
            spread = (each.max() - each.min()) / each.mean()
            lines.append(f"{mean} | | between seeds {100 * spread:.2f} %: {', '.join(f'{x:.4f}' for x in each)} |")
            continue
        over = np.mean([losses[seed] for seed in seeds]) / np.mean([beside[seed] for seed in seeds]) - 1
        each = ", ".join(f"{100 * (losses[seed] / beside[seed] - 1):+.2f} %" for seed in seeds)
        verdict = "" if over <= ALLOWED[recipe] else ", **missed**"
        lines.append(f"{mean} {100 * over:+.2f} %{verdict} | {100 * ALLOWED[recipe]:g} % | {each} |")
    return "\n".join(lines)


def main() -> None:
    settings, options = arguments()
    reason = plots.missing() if options.plot else None
    if reason:
        raise SystemExit(reason)
    text = data.load(settings.text)
    windows = data.held_out_windows(text.held_out[: options.held_out + 1], settings.length)
    held_out = windows[: len(windows) // settings.batch * settings.batch]
    if not len(held_out):
        raise SystemExit(
            f"--held-out {options.held_out} is less than a batch, {settings.batch} x {settings.length} bytes"
        )
    about = {name: value for name, value in dataclasses.asdict(settings).items() if name not in CHANGING}
    about |= {"bytes": len(text.train), "held_out_windows": len(held_out), "backend": jax.default_backend()}
    results = Results(options.json, about)
    programs: dict[str, train_lm.Program] = {}
    for seed in options.seeds:
        for recipe in options.recipes:
            name = f"{recipe}/{seed}"
            if name in results.runs:
                continue
            this = dataclasses.replace(settings, seed=seed, recipe=recipe)
            if recipe not in programs:
                programs[recipe] = train_lm.build(this)
            results.add(name, train(programs[recipe], this, text, held_out))
            run = results.runs[name]
            print(f"{name}: held out {run['held_out']:.4f} bits per byte, {run['seconds']} s", flush=True)
    print(table(results.runs))
    print(json.dumps(about))
    if options.plot:
        plots.convergence(results.runs, BASE, options.plot)


if __name__ == "__main__":
    main()
