"""Dividing one model over several workers: pipelines, tensors, branches, replicas in one process."""
