"""No figures without right answers: what a benchmark checks before it measures."""

from __future__ import annotations

from collections.abc import Sequence

from engines import MlxLm, OurEngine, Trace
from harness import DEMO, refuse
from load_client import Answer
from servers import Server, load
from workload import QUESTIONS, Row, question_prompts

ANSWER_TOKENS = 64


def check_engine() -> None:
    """The embedded model answers its questions alone and in one batch as mlx-lm's
    `stream_generate` does, token for token (greedy). Ends the program otherwise."""
    peer = MlxLm(DEMO)
    rows = [Row(prompt, ANSWER_TOKENS) for prompt in question_prompts(peer.tokenizer)]
    expected = [peer.stream(row).text for row in rows]
    ours = OurEngine(DEMO)
    try:
        compare("alone", expected, [ours.generate([row], ignore_eos=False)[0] for row in rows])
        compare("in one batch", expected, ours.generate(rows, ignore_eos=False))
    finally:
        ours.close()


def compare(how: str, expected: Sequence[str], found: Sequence[Trace | Answer]) -> None:
    for wanted, answer in zip(expected, found, strict=True):
        if answer.text != wanted:
            refuse(f"a greedy answer {how} is {answer.text!r}, and mlx-lm's is {wanted!r}")


def check_server(server: Server) -> None:
    """Over HTTP the embedded model answers its questions, alone and all at once, as mlx-lm's
    `stream_generate` does (greedy). Ends the program otherwise."""
    peer = MlxLm(DEMO)
    rows = [Row(prompt, ANSWER_TOKENS) for prompt in question_prompts(peer.tokenizer)]
    expected = [peer.stream(row).text for row in rows]
    requests = [
        server.request(
            "/chat/completions",
            {
                "messages": [{"role": "user", "content": question}],
                "max_tokens": ANSWER_TOKENS,
                "temperature": 0,
                "stream": True,
            },
        )
        for question in QUESTIONS
    ]
    compare("alone over HTTP", expected, [load([request])[0] for request in requests])
    compare("with others over HTTP", expected, load(requests))
