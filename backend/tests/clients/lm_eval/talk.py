"""lm-eval on tasks of three lines: log-likelihoods of completions, completions, and chat."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
os.chdir(HERE)
cache = tempfile.TemporaryDirectory()
os.environ |= {"HF_HOME": cache.name, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

URL = sys.argv[1]
TASKS = TaskManager(include_path=str(HERE / "tasks"), include_defaults=False)


def score(model: str, path: str, task: str, *, chat: bool = False, **args: Any) -> dict[str, Any]:
    found = lm_eval.simple_evaluate(
        model=model,
        model_args={
            "model": "mlx-manager/demo",
            "base_url": f"{URL}/{path}",
            "max_retries": 1,
            **args,
        },
        tasks=[task],
        task_manager=TASKS,
        apply_chat_template=chat,
        bootstrap_iters=0,
    )
    for sample in found["samples"][task]:
        print(task, sample["resps"])
    return found["results"][task]


# Its tokens are the server's: it finds /tokenizer_info, /tokenize and /detokenize.
choice = score("local-completions", "completions", "choice")
assert choice["acc,none"] == 1, choice
assert score("local-completions", "completions", "choice", num_concurrent=3, batch_size=2) == choice
told = score("local-completions", "completions", "continue", tokenized_requests=False)
assert told["exact_match,none"] == 1, told
answer = score("local-chat-completions", "chat/completions", "answer", chat=True, num_concurrent=2)
assert answer["exact_match,none"] == 1, answer
