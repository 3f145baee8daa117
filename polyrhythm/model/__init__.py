"""A model and its optimizer as flat vectors: the layout, a worker's replica, a server's shard."""
