"""What is asked: prompts of a wanted length that no cache has seen, and questions with answers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

QUESTIONS = (
    "How do I start the server?",
    "How can I change the port?",
    "Which models can you serve?",
    "Hello, who are you?",
    "What is 12 + 30?",
    "How do I list the models?",
    "How do I stream an answer?",
    "How do I stop the server?",
)

WORDS = (
    "server model token page batch prompt answer stream client memory cache request step port "
    "weight device queue thread start stop list load text word line number question chat"
).split()


@dataclass(frozen=True, slots=True)
class Row:
    """One row of work: a prompt in tokens, how many to generate, how to sample."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0


def text_of(words: int, seed: int) -> str:
    """Words that differ from the first one on for every seed, so that no prefix is shared."""
    dice = random.Random(seed)
    return f"Note {seed}: " + " ".join(dice.choices(WORDS, k=words))


def chat(words: int, seed: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text_of(words, seed)}]


def prompt_of(tokenizer: Any, length: int, seed: int) -> tuple[int, ...]:
    """Exactly `length` tokens of text after the BOS."""
    text = text_of(length, seed)
    ids = tokenizer.encode(text, add_special_tokens=False)
    while len(ids) < length:
        ids = ids + ids
    return (tokenizer.bos_token_id, *ids[: length - 1])


def question_prompts(tokenizer: Any) -> list[tuple[int, ...]]:
    """The questions as the model's chat template renders them."""
    return [
        tuple(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True
            )
        )
        for question in QUESTIONS
    ]


def text_of_tokens(tokenizer: Any, length: int, seed: int) -> str:
    """Text of about `length` tokens: cut by tokens, it may come out a token longer or shorter."""
    ids = prompt_of(tokenizer, length + 1, seed)[1:]
    return str(tokenizer.decode(list(ids)))
