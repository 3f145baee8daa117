"""The session: what `init()` and `prepare()` do, in a single process and in a run."""
