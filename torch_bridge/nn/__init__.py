"""Layers for training: parameters, delivery of their gradients, and checkpoints; `torch_bridge` does the arithmetic."""

from torch_bridge.nn._primary import quantized_model_init as quantized_model_init
from torch_bridge.nn._recomputation import save_list as save_list
from torch_bridge.nn.activation import ScaledActivation as ScaledActivation
from torch_bridge.nn.activation import ScaledClampedQGeGLU as ScaledClampedQGeGLU
from torch_bridge.nn.activation import ScaledSiTUGLU as ScaledSiTUGLU
from torch_bridge.nn.activation import ScaledSReLU as ScaledSReLU
from torch_bridge.nn.activation import ScaledSwiGLU as ScaledSwiGLU
from torch_bridge.nn.linear import GroupedLinear as GroupedLinear
from torch_bridge.nn.mlp import GroupedMLP as GroupedMLP
from torch_bridge.nn.moe import MoE as MoE
from torch_bridge.nn.sequential import Sequential as Sequential
from torch_bridge.quantized_weight import QuantizedWeight as QuantizedWeight
