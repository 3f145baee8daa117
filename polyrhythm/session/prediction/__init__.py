"""`session.predict`: the outputs of the model for all batches of a loader, computed by all workers."""
