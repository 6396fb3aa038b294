"""Pictures that requests bring: their sources, and the checks before a model sees one."""
