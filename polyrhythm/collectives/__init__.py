"""How workers agree on a vector. One arithmetic for all of them, so that every world gives the same bits."""
