"""HogWild!: workers of one host update shared parameters without locks."""
