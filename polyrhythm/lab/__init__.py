"""Tools to compare, measure and explain algorithms."""
