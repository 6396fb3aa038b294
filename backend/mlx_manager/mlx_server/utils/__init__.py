"""Small things that know nothing of models: the memory ledger, threads, clocks, texts."""
