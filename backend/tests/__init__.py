"""A package, so that `tests.mlx_server` is found here whatever else of that name is installed."""
