"""Strom's threshold broadcast: every worker sends pulses to all others."""
