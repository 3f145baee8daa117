"""The types that everything else is written in: strategies, nodes, messages, errors, the grammar."""
