"""Strategies in which workers exchange with each other, without a server."""
