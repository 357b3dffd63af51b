"""The results of a run: a picture, a sample, and the figures as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt


def picture(path: Path, losses: list[float], held_out: float, others: dict[str, float], load: np.ndarray) -> None:
    """Draws the loss (bits per byte) over the steps, and the share of rows per expert [layers, experts]."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), width_ratios=(3, 2), layout="constrained")
    steps = np.arange(1, len(losses) + 1)
    left.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8)
    window = max(1, len(losses) // 25)
    smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
    left.plot(steps[window - 1 :], smooth, color="tab:blue", label="training")
    left.plot(steps[-1], held_out, "o", color="tab:red", label=f"held out: {held_out:.2f}")
    for (name, bits), style in zip(others.items(), (":", "--", "-.", (0, (1, 4))), strict=True):
        left.axhline(bits, color="gray", linestyle=style, label=f"{name}: {bits:.2f}")
    left.set(xlabel="step", ylabel="bits per byte", title="Loss", ylim=(0, max(5.5, 1.1 * held_out)))
    left.legend()

    share = load / load.sum(axis=1, keepdims=True)
    image = right.imshow(share, aspect="auto", cmap="viridis", vmin=0)
    right.set(xlabel="expert", ylabel="layer", title="Share of held-out rows of each expert")
    right.set(xticks=range(share.shape[1]), yticks=range(share.shape[0]))
    figure.colorbar(image, ax=right)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(folder: Path, sample: bytes, figures: dict[str, Any]) -> None:
    """Writes the sample and the figures of the run."""
    (folder / "sample.txt").write_bytes(sample)
    (folder / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")


def three_digits(number: float) -> str:
    """Formats a positive number with three significant digits, from 100 on as an integer."""
    return f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}"


def printable(text: bytes) -> str:
    """Decodes the bytes for a terminal: control characters and invalid UTF-8 become a question mark."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in decoded)
