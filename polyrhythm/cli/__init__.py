"""The command line: one file per command, and `entry` with the parser."""
