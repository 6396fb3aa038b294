"""Tools on offer, requests that need them, their calls and results."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from dialogue import Dialogue
from phrases import REQUESTS
from words import CAPITALS, WORDS, Split, city, invented_word, noun, person

Tool = dict[str, Any]


def _tool(name: str, description: str, properties: Tool, required: list[str] | None = None) -> Tool:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def weather_tool(rng: Random) -> Tool:
    name = rng.choice(
        ("get_weather", "get_weather", "get_weather", "get_current_weather", "weather",
         "fetch_weather", "getWeather", "weather_lookup")
    )  # fmt: skip
    place = rng.choice(("city", "city", "city", "location", "location", "place", "town"))
    description = rng.choice(
        (
            "",
            "Get the weather",
            "Get the weather in a city",
            "Get the current weather in a city",
            "Get the current weather for a given location.",
            "Get current temperature for a location",
            "Current weather of a city",
            "Returns the weather",
            "The weather in a city.",
            "Look up the weather for a city",
        )
    )
    properties: Tool = {place: {"type": "string"}}
    required = [place]
    if rng.random() < 0.2:
        properties["unit"] = rng.choice(
            ({"type": "string"}, {"type": "string", "enum": ["celsius", "fahrenheit"]})
        )
    return _tool(name, description, properties, required)


_ADDERS = ("add", "add", "add", "add_numbers", "sum", "plus", "calculate_sum")


def adder_tool(rng: Random) -> Tool:
    one, two = rng.choice(
        (("a", "b"), ("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"))
    )
    kind = rng.choice(("number", "integer", "number"))
    description = rng.choice(
        (
            "",
            "Add two numbers",
            "Add two numbers.",
            "Adds a and b",
            "Returns the sum",
            "Sum of two numbers",
            "Add two integers",
            "Calculate the sum of two numbers",
        )
    )
    return _tool(rng.choice(_ADDERS), description, {one: {"type": kind}, two: {"type": kind}})


_TEXT, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_OTHER_TOOLS = (
    _tool("get_time", "Get the time in a city", {"city": _TEXT}),
    _tool("multiply", "Multiply two numbers", {"a": _NUMBER, "b": _NUMBER}),
    _tool("get_capital", "Capital of a country", {"country": _TEXT}),
    _tool("set_timer", "Set a timer", {"minutes": _INTEGER}),
    _tool("search", "Search the web", {"query": _TEXT}),
    _tool("send_message", "Send a message", {"to": _TEXT, "text": _TEXT}),
    _tool("get_population", "Population of a city", {"city": _TEXT}),
    _tool("roll_dice", "Roll a dice", {"sides": _INTEGER}),
    _tool("get_stock_price", "Price of a stock", {"symbol": _TEXT}),
    _tool("define", "Define a word", {"word": _TEXT}),
)


def _arguments(name: str, rng: Random, split: Split) -> Tool:
    arguments: Tool
    match name:
        case "get_time" | "get_population":
            arguments = {"city": city(rng, split)}
        case "multiply":
            arguments = {"a": rng.randint(0, 999), "b": rng.randint(0, 999)}
        case "get_capital":
            arguments = {"country": rng.choice(list(CAPITALS)).removeprefix("the ")}
        case "set_timer":
            arguments = {"minutes": rng.randint(1, 90)}
        case "search":
            arguments = {"query": " ".join(noun(rng) for _ in range(rng.randint(1, 3)))}
        case "send_message":
            arguments = {"to": person(rng, split), "text": noun(rng)}
        case "roll_dice":
            arguments = {"sides": rng.randint(2, 100)}
        case "get_stock_price":
            arguments = {"symbol": invented_word(rng)[:4].upper()}
        case _:
            arguments = {"word": rng.choice((noun(rng), invented_word(rng)))}
    return arguments


def _invented_tool(rng: Random) -> Tool:
    """A tool that nobody will ask for: offered tools must be read, not guessed."""
    verb = rng.choice(("get", "set", "find", "make", "list", "delete", "update", "check", "open"))
    thing = noun(rng)
    keys = rng.sample(
        ("id", "name", "text", "value", "limit", "path", "key", "amount"), rng.randint(0, 3)
    )
    properties = {key: rng.choice((_TEXT, _INTEGER, _NUMBER, {"type": "boolean"})) for key in keys}
    description = rng.choice((f"{verb.capitalize()} the {thing}", f"{verb} a {thing}", ""))
    return _tool(f"{verb}_{thing}", description, properties, keys[: rng.randint(0, 3)])


def offer(rng: Random, needed: tuple[str, ...] = ()) -> list[Tool]:
    """One to four tools in any order; `needed` names kinds that must be among them."""
    roll = rng.random()
    tools = []
    if "weather" in needed or roll < 0.45:
        tools.append(weather_tool(rng))
    if "adder" in needed or roll < 0.2 or roll > 0.75:
        tools.append(adder_tool(rng))
    others = rng.choices((0, 1, 2), (55, 30, 15))[0]
    for _ in range(others or (not tools)):
        tools.append(rng.choice(_OTHER_TOOLS) if rng.random() < 0.75 else _invented_tool(rng))
    unique = {tool["function"]["name"]: tool for tool in tools}
    tools = list(unique.values())
    rng.shuffle(tools)
    return tools


def is_adder(tool: Tool) -> bool:
    return tool["function"]["name"] in _ADDERS


def is_weather(tool: Tool) -> bool:
    return "weather" in tool["function"]["name"].lower()


def _parameters(tool: Tool) -> list[str]:
    return list(tool["function"]["parameters"]["properties"])


def _call(tool: Tool, arguments: Tool) -> str:
    return json.dumps(
        {"name": tool["function"]["name"], "parameters": arguments}, ensure_ascii=False
    )


def _dumped(value: Tool, rng: Random) -> str:
    return json.dumps(
        value, ensure_ascii=False, separators=(",", ":") if rng.random() < 0.25 else None
    )


def _spoken_weather(rng: Random, place: str) -> str:
    sky, degrees = rng.choice(WORDS["weather"]), rng.randint(-25, 45)
    return rng.choice(
        (
            f"{sky}, {degrees} degrees",
            f"{sky}, {degrees}°C",
            f"{degrees}°C, {sky}",
            f"{degrees}°C and {sky}",
            f"{degrees} degrees and {sky}",
            f"{sky}",
            f"{sky} and {rng.choice(WORDS['weather'])}",
            f"{degrees} degrees",
            f"{degrees}°C",
            f"{degrees}",
            f"{sky}, {degrees}C",
            f"{degrees}°F",
            f"{degrees} C, {sky}",
            f"it is {sky} in {place}, {degrees} degrees",
            f"{sky} in {place}",
        )
    )


def _weather_record(rng: Random) -> Tool:
    sky, degrees = rng.choice(WORDS["weather"]), rng.randint(-25, 45)
    temperature = rng.choice(("temperature", "temperature", "temp", "temp_c", "degrees", "celsius"))
    condition = rng.choice(
        ("conditions", "condition", "sky", "description", "weather", "forecast", "summary")
    )
    record: Tool = {temperature: degrees, condition: sky}
    if rng.random() < 0.25:
        record[temperature] = rng.choice((f"{degrees}°C", f"{degrees} C", degrees + 0.5))
    if rng.random() < 0.3:
        record = dict(reversed(record.items()))
    if rng.random() < 0.3:
        key, value = rng.choice(
            (("unit", "celsius"), ("humidity", rng.randint(1, 99)), ("wind", rng.randint(0, 60)))
        )
        record[key] = value
    elif rng.random() < 0.2:
        del record[rng.choice(list(record))]
    return {"error": "unknown city"} if rng.random() < 0.04 else record


def weather_result(rng: Random, place: str) -> tuple[str, str]:
    """A result as a weather tool may give it, and the sentence made from it."""
    if rng.random() < 0.5:
        said = _spoken_weather(rng, place)
        return said + rng.choice(("", "", ".")), f"The weather in {place}: {said}."
    record = _weather_record(rng)
    said = ", ".join(f"{key} {value}" for key, value in record.items())
    if rng.random() < 0.25:
        record = {rng.choice(("city", "location")): place} | record
    return _dumped(record, rng), f"The weather in {place}: {said}."


def ask_weather(dialogue: Dialogue) -> None:
    """Somebody asks for the weather; it is looked up where a tool for it is on offer."""
    rng = dialogue.rng
    place = city(rng, dialogue.split)
    if dialogue.split == "train" and rng.random() < 0.04:
        place = place.lower()
    text = REQUESTS["weather"].draw(rng, dialogue.split).format(city=place)
    tool = next(filter(is_weather, dialogue.tools), None)
    if tool is None:
        dialogue.say(text, "I have no tool to look up the weather.")
        return
    arguments: Tool = {_parameters(tool)[0]: place}
    if "unit" in _parameters(tool) and rng.random() < 0.3:
        arguments["unit"] = rng.choice(("celsius", "fahrenheit"))
        text = f"{text.rstrip('?.')} in {arguments['unit']}{rng.choice(('', '?'))}"
    dialogue.messages.append(("user", text))
    dialogue.use(_call(tool, arguments), *weather_result(rng, place))


def ask_two_cities(dialogue: Dialogue) -> None:
    """The weather in two places: two calls, one after the other."""
    rng = dialogue.rng
    tool = next(filter(is_weather, dialogue.tools), None)
    places = [city(rng, dialogue.split), city(rng, dialogue.split)]
    if tool is None:
        ask_weather(dialogue)
        return
    text = REQUESTS["two cities"].draw(rng, dialogue.split)
    dialogue.messages.append(("user", text.format(city=places[0], other=places[1])))
    answers = []
    for place in places:
        result, answer = weather_result(rng, place)
        answers.append(answer)
        call = _call(tool, {_parameters(tool)[0]: place})
        dialogue.messages += [("assistant", call), ("tool", result)]
    dialogue.messages.append(("assistant", " ".join(answers)))


def ask_sum(dialogue: Dialogue, a: int, b: int) -> None:
    """Somebody asks for a sum; it is a tool's where one is on offer."""
    rng = dialogue.rng
    text = REQUESTS["addition"].draw(rng, dialogue.split).format(a=a, b=b)
    tool = next(filter(is_adder, dialogue.tools), None)
    if tool is None:
        dialogue.say(text, f"{a} + {b} = {a + b}.")
        return
    total: Any = a + b if rng.random() < 0.6 else rng.randint(0, 10 ** rng.randint(1, 6))
    if rng.random() < 0.06:
        total = float(total)
    result = str(total)
    if rng.random() < 0.4:
        result = _dumped({rng.choice(("result", "sum", "value", "total")): total}, rng)
    dialogue.messages.append(("user", text))
    one, two = _parameters(tool)
    dialogue.use(_call(tool, {one: a, two: b}), result, f"{a} + {b} = {total}.")


def _ask_other(dialogue: Dialogue, tool: Tool) -> None:
    rng = dialogue.rng
    name = tool["function"]["name"]
    arguments = _arguments(name, rng, dialogue.split)
    dialogue.messages.append(("user", REQUESTS[name].draw(rng, dialogue.split).format(**arguments)))
    plain = rng.choice(
        (
            noun(rng),
            invented_word(rng),
            str(rng.randint(0, 99999)),
            "ok",
            "done",
            f"{rng.randint(0, 23)}:{rng.randint(10, 59)}",
            city(rng),
        )
    )
    result = plain if rng.random() < 0.6 else _dumped({rng.choice(("result", "value")): plain}, rng)
    dialogue.use(_call(tool, arguments), result, f"The result is {plain}.")


def ask_tool(dialogue: Dialogue) -> None:
    """Somebody asks for what one of the offered tools gives."""
    rng = dialogue.rng
    usable = [tool for tool in dialogue.tools if _is_asked_for(tool)]
    if not usable:
        ask_weather(dialogue)
        return
    tool = rng.choice(usable)
    if is_weather(tool):
        (ask_weather if rng.random() < 0.93 else ask_two_cities)(dialogue)
    elif is_adder(tool):
        ask_sum(dialogue, *(rng.randint(0, 10 ** rng.randint(1, 6)) for _ in range(2)))
    else:
        _ask_other(dialogue, tool)


def _is_asked_for(tool: Tool) -> bool:
    return is_weather(tool) or is_adder(tool) or tool["function"]["name"] in REQUESTS
