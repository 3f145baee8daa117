"""Ways to divide one model or one batch over several devices."""
