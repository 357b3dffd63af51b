"""Fine-tunes adapters (LoRA) of a mixture-of-experts language model whose experts are frozen in four bits.

    python examples/finetune_lora.py --compare              # both bases, under a minute on two CPU cores
    python examples/finetune_lora.py --device cuda --compare --width 2880 --mlp-dim 2880 --experts 32 --top-k 4 \\
        --layers 6 --rank 16 --batch 8 --length 1024        # experts of the shape of gpt-oss-20b

The base is random instead of pretrained: its experts hold MXFP4 codes (`--base mxfp4`), or the same values in bfloat16
(`--base bf16`), so both runs compute nearly the same, and their losses show it. Adapters of the experts are trained,
with norms and head; everything else is frozen. The text is the source of the Python standard library.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import NamedTuple, NoReturn

import torch
from lm import data
from lm.errors import UserError
from lm.torch_model import HEAD_WIDTH, LanguageModel
from tqdm import tqdm

import torch_bridge
from torch_bridge import nn

BASES = ("bf16", "mxfp4")


class Result(NamedTuple):
    """Bits per byte of each step, tokens per second, bytes of the experts' base, and peak GPU memory."""

    losses: list[float]
    tokens_per_second: float
    base_bytes: int
    peak_mib: float | None


def experts_of(model: torch.nn.Module) -> list[nn.GroupedLinear]:
    """The grouped layers of the model."""
    return [each for each in model.modules() if isinstance(each, nn.GroupedLinear)]


def base_bytes(model: torch.nn.Module) -> int:
    """Bytes of the frozen weights of the experts."""
    total = 0
    for weight in (weight for layer in experts_of(model) for weight in layer.weight_parameters()):
        parts = (weight.values, weight.scales) if torch_bridge.params.is_quantized_weight(weight) else (weight,)
        total += sum(part.nbytes for part in parts)
    return total


def make(options: argparse.Namespace, base: str) -> LanguageModel:
    """The model with this base; its frozen weights have the values of the MXFP4 one, whatever the base."""
    torch.manual_seed(options.seed)
    adapters = {"lora_rank": options.rank, "lora_alpha": 2.0 * options.rank, "dtype": torch.bfloat16}
    shape = (options.width, options.layers, options.experts, options.top_k)
    with torch.device(options.device):
        recipe = torch_bridge.weight_only("mxfp4")
        coded = LanguageModel(*shape, mlp_dim=options.mlp_dim, recipe=recipe, quantized_weights=True, **adapters)
        model = coded if base == "mxfp4" else LanguageModel(*shape, mlp_dim=options.mlp_dim, **adapters)
    if model is not coded:
        with torch.no_grad():
            for own, other in zip(experts_of(model), experts_of(coded), strict=True):
                own.take_plain(other.plain_members())
        state = {name: each for name, each in coded.state_dict().items() if ".linear_fc" not in name or "lora" in name}
        model.load_state_dict(state, strict=False)
        del coded
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name or "norm" in name or name.startswith("head"))
    for kind in (torch.nn.Linear, torch.nn.Embedding, torch.nn.RMSNorm):
        for module in model.modules():
            if isinstance(module, kind):
                module.to(torch.bfloat16)
    return model


def train(options: argparse.Namespace, base: str, text: data.Text) -> Result:
    """Trains for all steps and shows the progress in one line."""
    on_gpu = options.device == "cuda"
    model = make(options, base)
    held = base_bytes(model)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    batches = data.Batches(text.train, options.batch, options.length, options.seed)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses: list[float] = []
    seconds: list[float] = []
    with tqdm(total=options.steps, unit="step", desc=f"fine-tuning ({base})", file=sys.stderr) as bar:
        for _ in range(options.steps):
            drawn = torch.from_numpy(batches.draw()).to(options.device)
            start = time.perf_counter()
            nats, balance = model(drawn)
            (nats + balance).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(nats.detach()) / math.log(2))  # waits for the device
            seconds.append(time.perf_counter() - start)
            bar.set_postfix_str(f"{losses[-1]:.3f} bits/byte", refresh=False)
            bar.update()
    timed = sorted(seconds[3:] or seconds)
    tokens = options.batch * options.length
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None
    return Result(losses, tokens / timed[len(timed) // 2], held, peak)


def table(results: dict[str, Result]) -> str:
    """One line per base."""
    lines = [f"{'base':<8}{'first loss':>12}{'last loss':>12}{'tokens/s':>12}{'base MiB':>12}{'peak MiB':>12}"]
    for base, each in results.items():
        peak = "-" if each.peak_mib is None else f"{each.peak_mib:.0f}"
        numbers = f"{each.losses[0]:>12.4f}{each.losses[-1]:>12.4f}{each.tokens_per_second:>12.0f}"
        lines.append(f"{base:<8}{numbers}{each.base_bytes / 2**20:>12.1f}{peak:>12}")
    if len(results) == len(BASES):
        plain, coded = results["bf16"], results["mxfp4"]
        apart = max(abs(a - b) for a, b in zip(plain.losses, coded.losses, strict=True))
        size, speed = coded.base_bytes / plain.base_bytes, coded.tokens_per_second / plain.tokens_per_second
        lines.append(
            f"mxfp4 over bf16: {size:.3f} of the bytes of the base, {speed:.2f} of the speed; losses differ by at most "
            f"{apart:.4f}"
        )
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--base", choices=BASES, default="mxfp4", help="of the experts (default: %(default)s)")
    add("--compare", action="store_true", help="run with each base")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--text", metavar="PATH", help="file or folder to learn from (default: the Python standard library)")
    for name, default in (
        *(("steps", 40), ("experts", 8), ("top-k", 2), ("width", 128), ("mlp-dim", 128), ("layers", 2)),
        *(("rank", 8), ("batch", 4), ("length", 128)),
    ):
        add(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    add("--learning-rate", type=float, default=4e-3, help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    options = parser.parse_args(argv)
    for name in ("steps", "experts", "top_k", "width", "mlp_dim", "layers", "rank", "batch", "length"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)} is less than 1")
    if options.top_k > options.experts:
        raise UserError(f"--top-k {options.top_k} is more than --experts {options.experts}")
    if options.width % HEAD_WIDTH:
        raise UserError(f"--width {options.width} is not a multiple of {HEAD_WIDTH}, the width of an attention head")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no GPU here")
    return options


def main(argv: list[str] | None = None) -> int:
    try:
        options = parse_arguments(argv)
        text = data.load(options.text)
        if len(text.train) <= options.length:
            raise UserError(
                f"the text has {len(text.train)} bytes to learn from, too few for --length {options.length}"
            )
        bases = BASES if options.compare else (options.base,)
        print(table({base: train(options, base, text) for base in bases}))
    except UserError as error:
        print(f"finetune_lora: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("finetune_lora: stopped by Ctrl-C", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
