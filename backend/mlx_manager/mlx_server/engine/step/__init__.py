"""One step of a model: its batch, the run of the model, the order of the stages, and its times."""
