"""The update rules of all strategies, written down a second time from their papers.

A reference takes a finished `Run` and computes where every worker should have been after every step, and what
the run should have brought home. It uses nothing of the package but the fields of the strategy. From the
event log it takes the order in which messages arrived, and not what was made of them. So a wrong factor, sign
or order of operations in a strategy shows as a difference, at the first step that it touches.

    b <- mu b + g + decay w;  w <- w - lr b        the script's optimizer, as PyTorch's SGD has it
"""
