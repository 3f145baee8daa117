"""How workers agree on a vector: in shared memory, by direct exchange, around a ring, or both."""
