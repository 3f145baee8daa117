"""The run folder: the files of a run."""
