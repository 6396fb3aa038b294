"""The embedded model, held to what requests demand of its answers.

`MLX_TEST_ALL=1` tries every schema and every question instead of a sample.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from backends.generated_schemas import generated_schemas
from demo import Demo, demo
from thorough import ALL

from mlx_manager.mlx_server.errors import (
    InvalidParameter,
    MLXManagerError,
)

__all__ = ["demo"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

DATA = Path(__file__).parents[5] / "shared/data"

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
UNHELD = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}
QUESTION = "What is the weather in Paris?"


def lines(name: str, sample: int) -> list[dict[str, Any]]:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return found if ALL else found[:: len(found) // sample]


def schema_format(schema: Any, strict: bool = False) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}


def with_json_types(schema: Any) -> Any:
    """The functions' parameters with Python's names of types replaced by JSON Schema's."""
    names = {"dict": "object", "float": "number", "tuple": "array"}
    if isinstance(schema, list):
        return [with_json_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    fixed = {key: with_json_types(value) for key, value in schema.items()}
    kind = fixed.get("type")
    if kind == "any":
        del fixed["type"]
    elif isinstance(kind, str):
        fixed["type"] = names.get(kind, kind)
    return fixed


# Forms


async def test_an_object_is_json(demo: Demo):
    choice = await demo.choice(
        "Write JSON.", response_format={"type": "json_object"}, max_tokens=200, temperature=0
    )
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["message"]["content"]), dict)


async def fitted_or_refused(demo: Demo, schemas: list[Any]) -> tuple[int, int, int]:
    """How many schemas were fitted, refused and cut; what was completed fits its schema."""

    async def one(schema: Any) -> dict[str, Any] | str:
        try:
            return await demo.choice(
                "Write JSON.",
                response_format=schema_format(schema, strict=True),
                max_tokens=200,
                temperature=0.7,
                seed=3,
            )
        except InvalidParameter as error:
            return error.message

    fitted = refused = cut = 0
    answers = await asyncio.gather(*[one(schema) for schema in schemas])
    for schema, answer in zip(schemas, answers, strict=True):
        if isinstance(answer, str):
            assert "`response_format` can't be honoured: " in answer
            refused += 1
        elif answer["finish_reason"] == "length":
            cut += 1
        else:
            check = jsonschema.validators.validator_for(
                schema, default=jsonschema.Draft202012Validator
            )(schema)
            content = answer["message"]["content"]
            check.validate(json.loads(content, object_pairs_hook=counted_twice))
            fitted += 1
    return fitted, refused, cut


def counted_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in which a name that comes twice, as one may that the schema does not have, is two,
    as `minProperties` is held to."""
    found: dict[str, Any] = {}
    for place, (name, value) in enumerate(pairs):
        found[f"{name} {place}" if name in found else name] = value
    return found


async def test_real_schemas_are_fitted_or_refused(demo: Demo):
    schemas = [line["schema"] for line in lines("json_schemas.jsonl", 24)]
    fitted, _, _ = await fitted_or_refused(demo, schemas)
    assert fitted > len(schemas) / 2


async def test_schemas_that_nobody_would_write_are_fitted_or_refused(demo: Demo):
    schemas = generated_schemas(340 if ALL else 40)
    fitted, refused, cut = await fitted_or_refused(demo, schemas)
    assert fitted > len(schemas) / 4, (fitted, refused, cut)
    assert refused > 0.1 * len(schemas), (fitted, refused, cut)


async def test_a_cut_is_reported_as_one(demo: Demo):
    choice = await demo.choice("Who?", response_format=schema_format(PERSON), max_tokens=3)
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"guided_choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
        ({"structured_outputs": {"choice": ["ä", "ö"]}}, "ä|ö"),
        ({"guided_grammar": 'root ::= ("ab" | "cd") root | "."'}, r"(ab|cd)*\."),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/ "y"?'}}, "x[0-9]y?"),
    ],
)
async def test_an_answer_matches(demo: Demo, fields: dict[str, Any], pattern: str):
    choice = await demo.choice("Say something.", temperature=1.5, max_tokens=60, n=1, **fields)
    assert choice["finish_reason"] in ("stop", "length")
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, choice["message"]["content"])


async def test_completions_are_held_to_forms_too(demo: Demo):
    body = await demo.completion("A number:", guided_regex=" [0-9]{4}", max_tokens=20)
    assert re.fullmatch(" [0-9]{4}", body["choices"][0]["text"])
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_what_is_streamed_is_what_comes_whole(demo: Demo):
    asked: dict[str, Any] = {
        "response_format": schema_format(PERSON, strict=True),
        "seed": 5,
        "max_tokens": 100,
    }
    whole = await demo.choice("Ada is 36.", **asked)
    chunks = await demo.stream("Ada is 36.", **asked)
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert text == whole["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("name", ["<|eot_id|>", "<|python_tag|>", "<|begin_of_text|>"])
async def test_a_special_tokens_name_in_a_form_is_a_text(demo: Demo, name: str):
    text = f"x{name}y"
    for fields, wanted in (
        ({"guided_choice": [text]}, text),
        ({"guided_regex": re.escape(text)}, text),
        ({"guided_grammar": f"start: {json.dumps(text)}"}, text),
        ({"guided_json": {"const": text}}, json.dumps(text)),
    ):
        answer = await demo.choice("Hello!", max_tokens=60, temperature=0, **fields)
        assert (answer["message"]["content"], answer["finish_reason"]) == (wanted, "stop"), fields
    parameters = {"properties": {"a": {"const": text}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = await demo.choice("Hello!", tools=[tool], tool_choice="required", temperature=0)
    (call,) = answer["message"]["tool_calls"][:1]
    assert json.loads(call["function"]["arguments"]) == {"a": text}


async def test_several_answers_all_fit_and_seeds_tell_them_apart(demo: Demo):
    asked: dict[str, Any] = {
        "response_format": schema_format(PERSON),
        "temperature": 1.5,
        "seed": 9,
        "max_tokens": 200,
    }
    several = (await demo.chat("Who?", n=4, **asked))["choices"]
    texts = [choice["message"]["content"] for choice in several]
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) > 1
    assert (await demo.choice("Who?", **asked))["message"]["content"] == texts[0]


async def test_stop_strings_and_ends_cut_into_a_form(demo: Demo):
    choice = await demo.choice("x", guided_regex="ab+cd", stop=["c"], temperature=1.0, seed=1)
    assert re.fullmatch("ab+", choice["message"]["content"])
    assert choice["finish_reason"] == "stop"


async def test_the_grammar_ends_the_answer_whatever_else_is_asked(demo: Demo):
    choice = await demo.choice("x", guided_choice=["yes"], ignore_eos=True, min_tokens=5)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("yes", "stop")


WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.mark.parametrize("cut", [False, True])
async def test_only_whole_calls_are_what_an_answer_stops_for(demo: Demo, cut: bool):
    asked: dict[str, Any] = {"tools": [WEATHER_TOOL], "tool_choice": "required", "temperature": 0}
    choice = await demo.choice("What is the weather in Paris?", return_token_ids=True, **asked)
    assert choice["finish_reason"] == "tool_calls"
    if cut:
        # In the middle of the arguments.
        ids = choice["token_ids"]
        stop = next(i for i in reversed(ids[:-3]) if ids.count(i) == 1)
        choice = await demo.choice("What is the weather in Paris?", stop_token_ids=[stop], **asked)
        assert choice["finish_reason"] == "stop"
        with pytest.raises(json.JSONDecodeError):
            json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"guided_choice": [""], "min_tokens": 3}, ""),
        ({"guided_regex": "()", "min_tokens": 1}, ""),
        # It has no other end than tokens that stop the answer.
        ({"guided_choice": ["yes"], "min_tokens": 9, "stop_token_ids": [88]}, ""),
        ({"guided_choice": ["yes"], "min_tokens": 9, "stop_token_ids": [303]}, "y"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_an_answer_is_as_short_as_its_form_has_it(
    demo: Demo, form: dict[str, Any], text: str, temperature: float
):
    choice = await demo.choice("x", temperature=temperature, seed=3, **form)
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


async def test_neighbours_draw_what_they_draw_alone(demo: Demo):
    asked: dict[str, Any] = {"temperature": 1.2, "seed": 4, "max_tokens": 40}
    alone = await demo.choice("Hello!", **asked)
    held = [
        demo.choice("x", response_format=schema_format(PERSON), max_tokens=60) for _ in range(5)
    ]
    together = await asyncio.gather(demo.choice("Hello!", **asked), *held)
    assert together[0] == alone


PROGRAM = """start: statement+
statement: type NAME "=" sum ";" | "if" "(" sum ")" "{" statement* "}" | "return" sum ";"
sum: sum "+" sum | sum "-" sum | sum "*" sum | sum "<" sum | "(" sum ")" | call | NAME | NUMBER
call: NAME "(" (sum ("," sum)*)? ")"
type: "int" | "char"
NAME: /[a-z_][a-z0-9_]*/
NUMBER: /[0-9]+/
%ignore /[ \\n]+/
"""


async def test_a_grammar_that_is_too_ambiguous_fails_and_no_neighbour_with_it(demo: Demo):
    asked: dict[str, Any] = {"temperature": 1.2, "seed": 4, "max_tokens": 60}
    ambiguous = "start: text /0{99}/\ntext: text text | /[a-z ]/"
    alone = await demo.choice("Hello!", **asked)
    beside, program, failure = await asyncio.gather(
        demo.choice("Hello!", **asked),
        demo.choice("x", guided_grammar=PROGRAM, temperature=0.9, seed=1, max_tokens=200),
        demo.stream("x", guided_grammar=ambiguous, temperature=0.0, max_tokens=400),
        return_exceptions=True,
    )
    assert beside == alone
    assert isinstance(program, dict)
    assert program["message"]["content"]
    assert isinstance(failure, InvalidParameter)
    assert failure.param == "guided_grammar"


async def test_many_options_and_wide_objects_are_not_too_ambiguous(demo: Demo):
    options = [f"option {i} of {i * 7919 % 1009}" for i in range(1500)]
    assert (await demo.choice("x", guided_choice=options))["message"]["content"] in options
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(200)}}
    choice = await demo.choice("x", response_format=schema_format(wide), max_tokens=20)
    assert choice["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema_format({"type": "thing"})}, "response_format"),
        ({"guided_json": '{"not": ' * 300 + "{}" + "}" * 300}, "guided_json"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"structured_outputs": {"json": {"type": 5}}}, "structured_outputs.json"),
        ({"response_format": schema_format({"not": {}}, strict=True)}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "clock"}},
            },
            "tool_choice",
        ),
        (
            {
                "tools": [UNHELD],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [WEATHER, UNHELD],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            "tools[1].function.parameters",
        ),
        (
            {
                "tools": [WEATHER, {"type": "function", "function": {"name": 'a"b'}}],
                "tool_choice": {"type": "function", "function": {"name": 'a"b'}},
            },
            "tools[1].function.name",
        ),
    ],
)
async def test_what_can_not_be_honoured_is_refused(demo: Demo, fields: dict[str, Any], param: str):
    with pytest.raises(MLXManagerError) as caught:
        await demo.chat("x", **fields)
    assert caught.value.param == param


# Tools


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
async def test_a_call_can_be_demanded(demo: Demo, choice: Any):
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice, "temperature": 0}
    answer = await demo.choice("Tell me a joke.", parallel_tool_calls=False, **asked)
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])


async def test_a_demanded_call_is_streamed_as_it_is_written(demo: Demo):
    chunks = await demo.stream(QUESTION, tools=[WEATHER], tool_choice="required", seed=2)
    deltas = [c["choices"][0]["delta"].get("tool_calls") for c in chunks]
    pieces = [d[0]["function"]["arguments"] for d in deltas if d]
    assert len(pieces) > 2
    assert json.loads("".join(pieces).partition("}")[0] + "}")["city"] is not None


async def test_a_form_leaves_room_for_calls(demo: Demo):
    asked: dict[str, Any] = {"tools": [WEATHER], "response_format": schema_format(PERSON)}
    called = await demo.choice(QUESTION, temperature=0, max_tokens=100, **asked)
    assert called["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    told = await demo.choice(QUESTION, tool_choice="none", max_tokens=100, temperature=0, **asked)
    jsonschema.validate(json.loads(told["message"]["content"]), PERSON)


async def test_strict_calls_fit_and_text_is_free(demo: Demo):
    function = WEATHER["function"] | {"strict": True}
    narrow = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Lima"]}}}
    narrow |= {"required": ["city"], "additionalProperties": False}
    tools = [{"type": "function", "function": function | {"parameters": narrow}}]
    called = await demo.choice(QUESTION, tools=tools, temperature=0, max_tokens=60)
    assert called["finish_reason"] == "tool_calls"
    (call,) = called["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), narrow)
    told = await demo.choice("Hello!", tools=tools, temperature=0, max_tokens=60)
    free = await demo.choice("Hello!", tools=[WEATHER], temperature=0, max_tokens=60)
    assert told["message"]["content"]
    assert told["finish_reason"] == free["finish_reason"] == "stop"


async def test_strict_parameters_that_can_not_be_honoured_are_refused(demo: Demo):
    bad = {"name": "f", "parameters": {"type": "object", "not": {}}}
    loose = [{"type": "function", "function": bad}, {"type": "function", "function": {"name": "g"}}]
    await demo.chat("Hello!", tools=loose, max_tokens=3)
    strict = [{"type": "function", "function": bad | {"strict": True}}]
    with pytest.raises(MLXManagerError) as caught:
        await demo.chat("Hello!", tools=strict)
    assert caught.value.param == "tools[0].function.parameters"
    mixed = [loose[0], {"type": "function", "function": {"name": "g", "strict": True}}]
    await demo.chat("Hello!", tools=mixed, max_tokens=3)


async def test_a_form_is_held_to_beside_parameters_that_can_not_be(demo: Demo):
    bad = {"name": "f", "parameters": {"type": "object", "not": {}}}
    loose = [WEATHER, {"type": "function", "function": bad}]
    asked: dict[str, Any] = {"response_format": schema_format(PERSON), "temperature": 0}
    called = await demo.choice(QUESTION, tools=loose, max_tokens=100, **asked)
    assert called["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    strict = [WEATHER, {"type": "function", "function": bad | {"strict": True}}]
    with pytest.raises(MLXManagerError) as caught:
        await demo.chat(QUESTION, tools=strict, **asked)
    assert caught.value.param == "tools[1].function.parameters"


async def test_every_question_gets_a_call_of_an_offered_function(demo: Demo):
    """The penalty keeps a model of this size from counting for ever in a list without end."""

    async def one(asked: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        tools = [{"type": "function", "function": f} for f in asked["function"]]
        answer = await demo.choice(
            asked["question"][0],
            tools=tools,
            tool_choice="required",
            max_tokens=2000,
            frequency_penalty=0.4,
            seed=1,
        )
        return {f["name"]: f["parameters"] for f in asked["function"]}, answer

    answers = await asyncio.gather(*[one(x) for x in lines("tool_calls.jsonl", 6)])
    for offered, answer in answers:
        assert answer["finish_reason"] == "tool_calls"
        assert answer["message"]["content"] is None
        for call in answer["message"]["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            jsonschema.validate(arguments, with_json_types(offered[call["function"]["name"]]))
