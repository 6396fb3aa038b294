"""The model by which agents are driven loads like any other, and keeps to its script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pools import open_pool
from scripted_model import call, make_scripted_model

from mlx_manager.mlx_server.services.inference import generate_chat_completion

SCRIPT = [
    call("write", path="/tmp/a.txt", text='A "line"\n'),
    call("run", command="cat /tmp/a.txt > b; cat b") + "\n" + call("run", command="ls"),
    "It is done.",
]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("write", "run")
]


async def test_a_scripted_model_answers_by_its_script_and_begins_anew(tmp_path: Path):
    make_scripted_model(tmp_path / "a", SCRIPT, without_tools="No tools here.")
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "content": "Got it, says the agent for the model."},
        {"role": "user", "content": "Now."},
    ]
    async with open_pool(tmp_path) as pool:

        async def ask(**fields: Any) -> dict[str, Any]:
            body = await generate_chat_completion("a", said, pool=pool, **fields)
            assert isinstance(body, dict)
            message: dict[str, Any] = body["choices"][0]["message"]
            return message

        called = []
        for _ in range(2):
            for _ in SCRIPT:
                answer = await ask(tools=TOOLS, temperature=1.5)
                said.append(answer)
                calls = answer.get("tool_calls") or []
                for each in calls:
                    said.append({"role": "tool", "tool_call_id": each["id"], "content": "ok"})
                called += [json.loads(each["function"]["arguments"]) for each in calls]
            assert answer["content"] == "It is done."
            said.append({"role": "user", "content": "Again."})
        assert (await ask())["content"] == "No tools here."
    once = [
        {"path": "/tmp/a.txt", "text": 'A "line"\n'},
        *({"command": "cat /tmp/a.txt > b; cat b"}, {"command": "ls"}),
    ]
    assert called == once * 2
