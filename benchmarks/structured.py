"""What a grammar costs: compiling it, its masks, and the tokens per second of rows that share a
batch with constrained ones.

In process. Schemas: those of `--schemas` (a JSON line each, with `schema`), or a few of our own.
Compile times and masks are those of one matcher alone; a mask is filled before every token of an
answer that is drawn from the masks. The rates compare a batch in which every second row must fit a
schema with one in which none must; both generate the same number of tokens a row.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.utils import load_tokenizer

from checks import check_engine
from engines import OurEngine, Trace, decode_rate
from harness import (
    end_tokens,
    find_model,
    interleave,
    parser,
    percentile,
    print_report,
    ratio,
    refuse,
)
from mlx_manager.mlx_server.core import JsonSchema
from mlx_manager.mlx_server.errors import InvalidParameter
from mlx_manager.mlx_server.text.grammar.matchers import Grammars, fill_masks
from workload import Row, prompt_of

TEXT = {"type": "string"}
WORDS = {"type": "array", "items": TEXT}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"name": TEXT, "age": {"type": "integer"}}},
    {"type": "object", "properties": {"tags": WORDS, "size": {"enum": ["s", "m", "l"]}}},
    {"type": "array", "items": {"type": "object", "properties": {"at": {"type": "number"}}}},
)
ENDLESS = JsonSchema(json.dumps({"type": "array", "items": TEXT, "minItems": 100_000}))
"""Never complete, so that the rows it holds generate as long as the others."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one schema, in seconds: until it is compiled, and each of its masks."""

    compile: float
    masks: list[float]


def cost(grammars: Grammars, schema: Any, tokens: int, dice: random.Random) -> Cost | None:
    """None where the schema is refused."""
    begin = time.perf_counter()
    try:
        matcher = grammars.answer(JsonSchema(json.dumps(schema)))
    except InvalidParameter:
        return None
    compiled = time.perf_counter() - begin
    masks = []
    while len(masks) < tokens and not matcher.is_stopped():
        begin = time.perf_counter()
        mask = fill_masks(None, [matcher], grammars.words)[0]
        masks.append(time.perf_counter() - begin)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        matcher.consume_token(int(dice.choice(allowed)))
    return Cost(compiled, masks)


def cost_lines(costs: Sequence[Cost]) -> list[list[str]]:
    def line(name: str, values: Sequence[float]) -> list[str]:
        figures = [statistics.median(values), percentile(values, 0.99), max(values)]
        return [name, f"{len(values):,}", *(f"{1000 * figure:.3f}" for figure in figures)]

    return [
        line("compile a schema", [each.compile for each in costs]),
        line("a mask", [mask for each in costs for mask in each.masks]),
    ]


def generate(engine: OurEngine, number: int, rows: int, tokens: int, constrained: bool) -> float:
    """Tokens per second while all rows are generating."""
    tokenizer = engine.loaded.tokenizer
    batch = [Row(prompt_of(tokenizer, 32, 1000 * (number + 2) + i), tokens) for i in range(rows)]
    forms = [ENDLESS if constrained and i % 2 else None for i in range(rows)]
    traces: list[Trace] = engine.generate_in_form(batch, forms)
    if any(trace.tokens != tokens for trace in traces):
        refuse(f"rows of {[trace.tokens for trace in traces]} tokens instead of {tokens}")
    return decode_rate(traces)


def main() -> None:
    arguments = parser(__doc__, rounds=9, model="f32")
    arguments.add_argument("--rows", type=int, default=16, help="rows in the batch")
    arguments.add_argument("--tokens", type=int, default=128, help="generated a row")
    arguments.add_argument("--schemas", type=Path, help="a file of schemas, a JSON line each")
    chosen = arguments.parse_args()
    check_engine()
    schemas: Sequence[Any] = SCHEMAS
    if chosen.schemas is not None:
        schemas = [json.loads(line)["schema"] for line in chosen.schemas.open()]
    with tempfile.TemporaryDirectory() as scratch:
        model = find_model(chosen.model, Path(scratch))
        grammars = Grammars(load_tokenizer(model), end_tokens(model))
        dice = random.Random(1)
        cost(grammars, True, 1, dice)  # Makes the vocabulary's trie, which all grammars share.
        found = [cost(grammars, schema, chosen.tokens, dice) for schema in schemas]
        costs = [each for each in found if each is not None]
        print_report(
            f"{len(costs)} schemas, {len(found) - len(costs)} refused: {chosen.model}",
            ["", "times", "median, ms", "p99, ms", "longest, ms"],
            cost_lines(costs),
        )
        engine = OurEngine(model)
        rates = interleave(
            {
                "none": lambda n: generate(engine, n, chosen.rows, chosen.tokens, False),
                "half": lambda n: generate(engine, n, chosen.rows, chosen.tokens, True),
            },
            chosen.rounds,
        )
        engine.close()
    print_report(
        f"{chosen.rows} rows, of which constrained: {chosen.model}",
        ["constrained", "tokens/s", "÷ none"],
        [
            [name, f"{statistics.median(values):,.0f}", str(ratio(values, rates["none"]))]
            for name, values in rates.items()
        ],
    )


if __name__ == "__main__":
    main()
