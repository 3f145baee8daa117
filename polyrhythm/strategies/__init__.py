"""The strategies. `polyrhythm.core.registry` finds every class in here that has a name."""
