"""Models cut into parts that run on several workers."""
