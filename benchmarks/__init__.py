"""Ratios that the README and the docs claim, each measured in one run: `python -m benchmarks`."""
