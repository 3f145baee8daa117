"""Data sets: the digits included in the package, and a reader for files in MNIST format."""

from polyrhythm.data.digits import digits
from polyrhythm.data.mnist import mnist

__all__ = ["digits", "mnist"]
