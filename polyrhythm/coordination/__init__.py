"""What the nodes of a run have to agree on: membership, leases, the summary. Logic without I/O."""
