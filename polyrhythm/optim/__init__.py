"""Optimizers and learning-rate rules for large batches and sparse rows."""
