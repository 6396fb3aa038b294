"""instructor: typed answers through tools and schemas, of chat, Responses and Messages."""

from __future__ import annotations

import sys

import instructor
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel

URL = sys.argv[1]
MODEL = "mlx-manager/demo"


class Person(BaseModel):
    """A person."""

    name: str
    age: int


gpt = OpenAI(base_url=URL, api_key="none", max_retries=0)
claude = Anthropic(base_url=URL.removesuffix("/v1"), api_key="none", max_retries=0)
greedy = {"extra_body": {"temperature": 0}}
for typed in (
    instructor.from_openai(gpt, mode=instructor.Mode.TOOLS),
    instructor.from_openai(gpt, mode=instructor.Mode.TOOLS_STRICT),
    instructor.from_openai(gpt, mode=instructor.Mode.JSON_SCHEMA),
    instructor.from_openai(gpt, mode=instructor.Mode.RESPONSES_TOOLS),
    instructor.from_anthropic(claude, mode=instructor.Mode.ANTHROPIC_TOOLS),
):
    asked = {
        "model": MODEL,
        "max_tokens": 200,
        "max_retries": 0,
        "messages": [{"role": "user", "content": "Ada is 36."}],
        **greedy,
    }
    person = typed.create(response_model=Person, **asked)
    assert isinstance(person, Person)
    *_, last = typed.create_partial(response_model=Person, **asked)
    assert last.model_dump() == person.model_dump(), typed.mode
