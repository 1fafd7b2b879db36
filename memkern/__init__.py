"""Fused layers and optimizers for mixed-precision training when GPU memory is short."""

from memkern import amp, backends, functional, nn, optim
from memkern.backends import backend
from memkern.patch import patch, unpatch

__version__ = "0.1.0"
__all__ = ["amp", "backend", "backends", "functional", "nn", "optim", "patch", "unpatch"]

backends.start()
