"""The functions users call, and the autograd Functions behind them, one file an op family.

Each family has a Function for the forward pass and one for the backward pass, so that the gradient can
be differentiated again (through plain PyTorch operations: right, not fused). ``backends.choose`` picks
the backend once, in the forward pass; the backward pass runs on the same one.
"""

from memkern.functional.cross_entropy import cross_entropy, distillation_loss
from memkern.functional.gelu import gelu
from memkern.functional.linear_cross_entropy import linear_cross_entropy
from memkern.functional.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from memkern.functional.softmax import log_softmax, scaled_masked_softmax, softmax

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "cross_entropy",
    "distillation_loss",
    "gelu",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "rms_norm",
    "scaled_masked_softmax",
    "softmax",
]
