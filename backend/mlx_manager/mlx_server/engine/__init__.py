"""The step loop of one model on the MLX thread (`text_engine`), and what it is made of.

`thread` brings it requests, `stream` takes events from it.
"""
