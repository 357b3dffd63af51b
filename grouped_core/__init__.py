"""Meaning without a framework: formats, recipes, calls, gradient rules, the oracle.

JAX users import `jax_grouped`, PyTorch users `torch_bridge`; NumPy and CuPy arrays go through `grouped_core.arrays`.
"""

from grouped_core.formats import Format as Format
from grouped_core.formats import QTensor as QTensor
from grouped_core.recipes import BF16 as BF16
from grouped_core.recipes import FP16 as FP16
from grouped_core.recipes import FP32 as FP32
from grouped_core.recipes import MXFP8 as MXFP8
from grouped_core.recipes import NVFP4 as NVFP4
from grouped_core.recipes import FP8Block as FP8Block
from grouped_core.recipes import FP8Current as FP8Current
from grouped_core.recipes import FP8Delayed as FP8Delayed
from grouped_core.recipes import Recipe as Recipe
from grouped_core.sizes import GroupSizes as GroupSizes
