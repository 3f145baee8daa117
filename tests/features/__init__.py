"""What real training loops do, and which strategies support it: `python -m tests.features`."""
