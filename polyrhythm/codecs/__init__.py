"""The codecs: one module a family. `polyrhythm.strategy` finds every class in here that has a name."""
