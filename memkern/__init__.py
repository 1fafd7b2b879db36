"""Fused layers and optimizers for mixed-precision training when GPU memory is short."""

from memkern import backends, functional, nn
from memkern.backends import backend
from memkern.patch import patch, unpatch

__version__ = "0.1.0"
__all__ = ["backend", "backends", "functional", "nn", "patch", "unpatch"]

backends.start()
