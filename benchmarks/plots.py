"""Plots of results: bars and their bound, rooflines, loss curves, steps of models. Only this file needs matplotlib.

python -m benchmarks.plots benchmarks/olmoe_step.json benchmarks/olmoe_step.png    # of bench_transformers.py --json
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row

MARKERS = {"forward": "o", "dgrad": "s", "wgrad": "^"}
BOUND = "dense"  # the candidate that is the upper bound of its row


def missing() -> str | None:
    """The reason why nothing can be drawn, or None."""
    if importlib.util.find_spec("matplotlib"):
        return None
    return "--plot needs matplotlib, which is not installed; install it, or keep the numbers with --json"


def grouped_matmul(rows: Sequence[Row], copy_bytes_per_s: float, path: Path) -> None:
    """One roofline per dtype, then a bar chart of shares per (dtype, product), in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    dtypes = list(dict.fromkeys(r.dtype for r in rows))
    panels = list(dict.fromkeys((r.dtype, r.product) for r in rows))
    names = list(dict.fromkeys(r.candidate for r in rows if r.timing and r.candidate != BOUND))
    colours = {name: plt.get_cmap("tab20")(i % 20) for i, name in enumerate(names)}
    height = len(dtypes) + len(panels)
    figure, axes = plt.subplots(height, 1, figsize=(12, 4 * height), squeeze=False, layout="constrained")
    for axis, dtype in zip(axes[:, 0], dtypes, strict=False):
        _roofline(axis, [r for r in rows if r.dtype == dtype], copy_bytes_per_s, colours)
    for axis, (dtype, product) in zip(axes[len(dtypes) :, 0], panels, strict=True):
        _bars(axis, [r for r in rows if (r.dtype, r.product) == (dtype, product)], colours)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _roofline(axis: Any, rows: Sequence[Row], copy_bytes_per_s: float, colours: dict[str, Any]) -> None:
    """TFLOP/s over operations per byte; the roofs are the copy and the fastest dense GEMM, both of this run."""
    dense = max(r.tflops for r in rows if r.candidate == BOUND and r.tflops)
    slope = copy_bytes_per_s / 1e12  # TFLOP/s at one operation per byte
    points = [r.intensity for r in rows if r.intensity]
    left, right = min([*points, dense / slope]) / 2, max([*points, dense / slope]) * 2
    axis.plot([left, dense / slope, right], [left * slope, dense, dense], color="black", linewidth=1)
    axis.text(left, left * slope, f" copy, {slope:.2f} TB/s", fontsize=7, va="top")
    axis.text(right, dense, f"dense, {dense:.3g} TFLOP/s ", fontsize=7, ha="right", va="bottom")
    for name, colour in colours.items():
        axis.plot([], [], "o", ms=4, color=colour, label=name)
    for product, marker in MARKERS.items():
        axis.plot([], [], marker, ms=4, color="black", label=product)
        for r in (r for r in rows if r.product == product and r.candidate in colours and r.tflops):
            axis.plot(r.intensity, r.tflops, marker, ms=4, color=colours[r.candidate])
    axis.set(xscale="log", yscale="log", xlabel="operations a byte of operands and result", ylabel="TFLOP/s")
    axis.set_title(f"roofline, {rows[0].dtype}", fontsize=9)
    axis.legend(fontsize=6, ncols=2)


def _bars(axis: Any, rows: Sequence[Row], colours: dict[str, Any]) -> None:
    """Share of the dense GEMM with the same operations, one group of bars per case; whiskers are the spread."""
    problems = list(dict.fromkeys(r.case for r in rows))
    width = 0.85 / max(1, len(colours))
    for i, (name, colour) in enumerate(colours.items()):
        mine = [r for r in rows if r.candidate == name and r.timing and r.share is not None]
        places = [problems.index(r.case) + (i + 0.5) * width - 0.425 for r in mine]
        spreads = [r.share * r.timing.spread for r in mine]
        axis.bar(places, [r.share for r in mine], width, yerr=spreads, color=colour, label=name, error_kw={"lw": 0.5})
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(problems)), problems)
    axis.set_ylabel("share of the dense product")
    axis.set_title(f"{rows[0].product}, {rows[0].dtype}", fontsize=9)
    axis.legend(fontsize=6, ncols=4)


def convergence(runs: dict[str, dict[str, Any]], base: str, path: Path) -> None:
    """Smoothed training losses over the steps, one line per run, and each run's held-out loss compared with `base`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    recipes = list(dict.fromkeys(name.split("/")[0] for name in runs))
    colours = {name: plt.get_cmap("tab10")(i) for i, name in enumerate(recipes)}
    figure, (curves, ends) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2), layout="constrained")
    for name, run in runs.items():
        recipe, seed = name.split("/")
        losses = run["losses"]
        window = max(1, len(losses) // 20)
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        label = recipe if seed == "0" else None
        steps = np.arange(len(smooth)) + window
        curves.plot(steps, smooth, color=colours[recipe], linewidth=1, alpha=0.8, label=label)
        if f"{base}/{seed}" in runs:
            over = 100 * (run["held_out"] / runs[f"{base}/{seed}"]["held_out"] - 1)
            ends.plot(recipes.index(recipe), over, "o", ms=5, color=colours[recipe])
    curves.set(xlabel="step", ylabel="bits per byte", title="training loss, a line for each recipe and seed")
    curves.legend(fontsize=8)
    ends.axhline(0, color="black", linewidth=0.8)
    ends.set_xticks(range(len(recipes)), recipes, rotation=30)
    ends.set(ylabel=f"% over {base} of the same seed", title="held-out loss, a point for each seed")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def model_steps(lines: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Time of a step and peak memory of each candidate on one model, with ratios to the first candidate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = [each for each in lines if each["timing"] is not None]
    names = [each["candidate"] for each in drawn]
    colours = ["tab:grey" if name.startswith("grouped_mm") else "tab:blue" for name in names]
    panels = {
        "ms per step": [each["timing"]["median_us"] / 1e3 for each in drawn],
        "peak memory, GiB": [each["peak_gib"] for each in drawn],
    }
    panels = {label: values for label, values in panels.items() if None not in values}  # a CPU has no peak
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 2.6), squeeze=False, layout="constrained")
    for axis, (label, values) in zip(axes[0], panels.items(), strict=True):
        bars = axis.barh(names, values, color=colours)
        texts = [f"{values[0]:.1f}"]
        for value in values[1:]:
            change = f"{value - values[0]:+.1f}" if "memory" in label else f"{values[0] / value:.2f} times as fast"
            texts.append(f"{value:.1f}  ({change})")
        axis.bar_label(bars, texts, padding=3, fontsize=8)
        axis.invert_yaxis()
        axis.set(xlabel=label, xlim=(0, 1.4 * max(values)))
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def models(source: Path, path: Path) -> None:
    """Draws what `bench_transformers.py --json` wrote: its first model."""
    found = json.loads(source.read_text())
    first = found["lines"][0]
    lines = [each for each in found["lines"] if all(each[key] == first[key] for key in ("model", "what", "layers"))]
    title = f"{first['model']}, {first['layers']} layers, {first['what']}, {first['tokens']} tokens"
    model_steps(lines, ", ".join([title, *filter(None, [found["machine"].get("gpu")])]), path)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("python -m benchmarks.plots RESULTS.json PICTURE.png")
    if reason := missing():
        sys.exit(reason)
    models(*map(Path, sys.argv[1:]))
