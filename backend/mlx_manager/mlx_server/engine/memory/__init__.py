"""Memory of one engine: what its pages, states, snapshots and steps take, each with a line in the
ledger."""
