"""Models on this machine: found (`catalog`), loaded once for all (`pool`, `loads`), within granted
memory (`grants`); what is known of their families; and their loading in a worker.
"""
