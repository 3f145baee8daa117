"""Compression: codecs, what a sender keeps between messages, and the compiled loops underneath."""
