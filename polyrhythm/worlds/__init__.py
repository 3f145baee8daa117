"""Where nodes run: real processes, or virtual time in one process. The same strategy code in all of them."""
