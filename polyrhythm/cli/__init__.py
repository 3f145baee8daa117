"""The command line: one file per command; `entry` has the parser."""
