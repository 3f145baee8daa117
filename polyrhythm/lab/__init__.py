"""Looking at strategies side by side."""
