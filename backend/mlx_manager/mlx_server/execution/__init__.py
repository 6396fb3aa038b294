"""Ways of running a model, and the choice of the right one."""
