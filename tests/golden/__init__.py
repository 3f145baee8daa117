"""The golden file: digests of what every strategy and codec computes, to notice any change of it.

`python -m tests.golden check` compares, `python -m tests.golden renew` rewrites `digests.json`. A digest that
differs is an error, or a fix that CHANGELOG.md names (docs/testing.md).
"""
