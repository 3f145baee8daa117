"""Data to train on: the digits that come with the package, and readers for files in MNIST's format."""

from polyrhythm.data.digits import digits
from polyrhythm.data.mnist import mnist

__all__ = ["digits", "mnist"]
