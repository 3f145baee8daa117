"""The run folder: what a run leaves on disk."""
