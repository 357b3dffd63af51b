"""How close do GEMMs of formats without tensor core support come to one widening pass and our bf16 kernel?

    python benchmarks/bench_widened.py [--cases A C] [--budget 2]

The share is (time of our bf16 kernel on bf16 operands + bytes of a widening pass over 0.85 of the copy rate) over the
time of the call, all in one run. A widening pass reads codes and scales and writes bf16.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import coded, harness
from grouped_core.calls import QuantizedSpec
from tests import cases

PASS_RATE = 0.85  # of the copy rate
PRODUCTS = (
    ("forward", ("mxfp8", "mxfp8")),
    ("forward", ("nvfp4", "nvfp4_2d")),
    ("forward", ("bf16", "mxfp8")),
    ("forward", ("bf16", "mxfp4")),
    ("dgrad", ("bf16", "mxfp4")),
    ("wgrad", ("mxfp8", "mxfp8")),
    ("wgrad", ("nvfp4", "nvfp4")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["A", "B", "C", "D", "E"])
    parser.add_argument("--budget", type=float, default=2.0, help="seconds per case and GEMM")
    arguments = parser.parse_args()
    rate = harness.copy_rate("cuda")
    print(
        f"copy {rate / 1e12:.2f} TB/s\n{'case':<6}{'product':<10}{'formats':<20}{'bf16 us':>10}{'us':>10}{'share':>8}"
    )
    for case in map(cases.named, arguments.cases):
        for product, formats in PRODUCTS:
            ours, _ = coded.thunk(case, product, formats, 1)
            plain, _ = coded.thunk(case, product, ("bf16", "bf16"), 1)
            thunks = {"ours": ours, "plain": plain}
            found = harness.measure(thunks, clock=harness.cuda_clock, rounds=20, budget_s=arguments.budget)
            pass_us = 0.0
            for spec in coded.specs(case, product, formats):
                if isinstance(spec, QuantizedSpec):
                    elements = 1
                    for dim in spec.shape:
                        elements *= dim
                    pass_us += (coded.bytes_of(spec) + 2 * elements) / (PASS_RATE * rate) * 1e6
            us, plain_us = found["ours"].median_us, found["plain"].median_us
            label = " x ".join(formats)
            print(
                f"{case.name:<6}{product:<10}{label:<20}{plain_us:>10.0f}{us:>10.0f}{(plain_us + pass_us) / us:>8.3f}",
                flush=True,
            )
    print(harness.machine())


if __name__ == "__main__":
    main()
