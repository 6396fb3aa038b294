"""Seed-OSS."""

from mlx_manager.mlx_server.models.family import Family

FAMILY = Family("seed-oss", named=r"seed[-_]?oss", thinking=(("<seed:think>", "</seed:think>"),))
