"""Transforms of gradients that come before a codec, such as the momentum correction of DGC."""
