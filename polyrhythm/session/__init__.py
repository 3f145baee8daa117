"""The session: what the three lines of a script do, alone and in a run."""
