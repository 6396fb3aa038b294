"""Our engine against mlx-lm's own, in one process: one row against `stream_generate`, several
against `BatchGenerator`.

Every row is asked for the same number of tokens. "whole" counts from submission to the last
token, prompts included; "decode" only while every row is generating.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from checks import check_engine
from engines import MlxLm, OurEngine, Trace, decode_rate, together, whole_rate
from harness import find_model, interleave, parser, print_report, ratio, wanted
from workload import Row, prompt_of

SHORT, LONG = 64, 2000
SAMPLED_ROWS = 32


@dataclass(frozen=True, slots=True)
class Scenario:
    """Rows with prompts of these lengths. `stretch` multiplies the tokens each generates, so that
    the short rows still run when the long one starts."""

    name: str
    lengths: tuple[int, ...]
    stretch: int = 1


SCENARIOS = (
    Scenario("1 row", (SHORT,)),
    *(Scenario(f"{n} rows", (SHORT,) * n) for n in (4, 16, 64)),
    *(
        Scenario(f"{n} rows, one of {LONG} and the rest of {SHORT}", (LONG, *(SHORT,) * (n - 1)), 2)
        for n in (4, 16, 64)
    ),
)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second; `decode` None where the rows never generate together."""

    whole: float
    decode: float | None


def rates(traces: Sequence[Trace]) -> Rates:
    return Rates(whole_rate(traces), decode_rate(traces) if together(traces) else None)


class Comparison:
    """Both engines with the same model loaded."""

    def __init__(self, model: Path, tokens: int, rounds: int) -> None:
        self._tokens = tokens
        self._rounds = rounds
        self._ours = OurEngine(model)
        self._theirs = MlxLm(model)

    def rows(self, scenario: Scenario, number: int) -> list[Row]:
        """Prompts that no earlier round has used, and that are the same for both sides."""
        tokens = self._tokens * scenario.stretch
        return [
            Row(prompt_of(self._theirs.tokenizer, length, 1000 * (number + 1) + i), tokens, seed=i)
            for i, length in enumerate(scenario.lengths)
        ]

    def their_traces(self, rows: Sequence[Row]) -> list[Trace]:
        return [self._theirs.stream(rows[0])] if len(rows) == 1 else self._theirs.batch(rows)

    def lengths(self, scenario: Scenario) -> list[str]:
        """One line of the first table."""
        runs = interleave(
            {
                "ours": lambda n: rates(self._ours.generate(self.rows(scenario, n))),
                "theirs": lambda n: rates(self.their_traces(self.rows(scenario, n))),
            },
            self._rounds,
        )
        line = [scenario.name]
        for part in ("whole", "decode"):
            ours, theirs = ([getattr(r, part) for r in runs[side]] for side in ("ours", "theirs"))
            if None in ours or None in theirs:
                line += ["never together", "", ""]
                continue
            line += [
                f"{statistics.median(theirs):,.0f}",
                f"{statistics.median(ours):,.0f}",
                str(ratio(ours, theirs)),
            ]
        return line

    def sampling(self) -> list[list[str]]:
        """Rows that each sample their own way, against rows that all sample the same way."""
        scenario = Scenario("", (SHORT,) * SAMPLED_ROWS)
        runs = interleave(
            {
                "ours, shared": lambda n: self._ours.generate(shared(self.rows(scenario, n))),
                "ours, own": lambda n: self._ours.generate(own(self.rows(scenario, n))),
                "theirs, shared": lambda n: self._theirs.batch(shared(self.rows(scenario, n))),
                "theirs, own": lambda n: self._theirs.batch(own(self.rows(scenario, n))),
            },
            self._rounds,
        )
        decode = {name: [decode_rate(traces) for traces in runs[name]] for name in runs}
        return [
            [
                side,
                f"{statistics.median(decode[f'{side}, shared']):,.0f}",
                f"{statistics.median(decode[f'{side}, own']):,.0f}",
                str(ratio(decode[f"{side}, own"], decode[f"{side}, shared"])),
            ]
            for side in ("theirs", "ours")
        ]

    def close(self) -> None:
        self._ours.close()


def shared(rows: Sequence[Row]) -> list[Row]:
    return [replace(row, temperature=0.8, top_p=0.95) for row in rows]


def own(rows: Sequence[Row]) -> list[Row]:
    return [
        replace(row, temperature=0.5 + index / 64, top_p=0.99 - index / 200)
        for index, row in enumerate(rows)
    ]


def main() -> None:
    arguments = parser(__doc__, rounds=5)
    arguments.add_argument("--tokens", type=int, default=128, help="generated a row")
    arguments.add_argument("--only", action="append", default=[], help="a table's line by name")
    chosen = arguments.parse_args()
    check_engine()
    with tempfile.TemporaryDirectory() as scratch:
        model = find_model(chosen.model, Path(scratch))
        comparison = Comparison(model, chosen.tokens, chosen.rounds)
        lines = [comparison.lengths(s) for s in SCENARIOS if wanted(s.name, chosen.only)]
        print_report(
            f"In process against mlx-lm: {chosen.model}, {chosen.tokens} tokens a row, tokens/s",
            ["prompts", "whole: mlx-lm", "ours", "ratio", "decode: mlx-lm", "ours", "ratio"],
            lines,
        )
        if wanted("sampling", chosen.only):
            print_report(
                f"{SAMPLED_ROWS} rows that sample: {chosen.model}, decode tokens/s",
                ["engine", "shared sampling", "each its own", "own ÷ shared"],
                comparison.sampling(),
            )
        comparison.close()


if __name__ == "__main__":
    main()
