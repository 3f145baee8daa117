"""The world of real processes."""
