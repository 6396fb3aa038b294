"""Clients that people use, each a real package in a process of its own: `make clients` gets them.

A client's script holds one conversation with the server and fails by itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from live import LiveServer
from talks import CLIENTS, talk_in_node, talk_in_python
from thorough import slow

# What lm-eval asks for, `test_tokens` and `test_logprobs` ask for in every run; what litellm does,
# the official packages and those that call them.
LARGE = {"lm_eval", "litellm"}
IN_PYTHON = [
    pytest.param(name, marks=[slow] if name in LARGE else [])
    for name in sorted(found.parent.name for found in CLIENTS.glob("*/talk.py"))
]
IN_NODE = sorted(found.stem for found in CLIENTS.glob("node/*.mjs"))


@pytest.mark.parametrize("name", IN_PYTHON)
def test_a_python_client_holds_its_conversation(name: str, server: LiveServer, tmp_path: Path):
    talk_in_python(name, "talk.py", server, tmp_path)


@pytest.mark.parametrize("name", IN_NODE)
def test_a_node_client_holds_its_conversation(name: str, server: LiveServer, tmp_path: Path):
    talk_in_node(f"{name}.mjs", server, tmp_path)
