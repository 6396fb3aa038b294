"""The rim: routes, keys, bodies, streams. `protocols` translates, and `services` has the calls."""
