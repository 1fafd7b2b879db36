"""Optimizers whose step unscales, checks, clips and updates in two passes over the gradients, without a host sync.

They take the place of PyTorch's, alone, with ``torch.amp.GradScaler`` or, reading the gradients once
less, with :class:`memkern.amp.GradScaler`.
"""

from memkern.optim.adam import Adam, AdamW
from memkern.optim.lamb import LAMB
from memkern.optim.lion import Lion
from memkern.optim.sgd import SGD

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Lion"]
