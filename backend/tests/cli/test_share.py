"""`bench --share`: two programs, one model, figures that can be compared and pasted."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from mlx_manager import __version__
from mlx_manager.bench.share import (
    Answer,
    Figures,
    Load,
    ShareFailed,
    command_for,
    model_facts,
    stream_generate,
    summary,
    take_turns,
)
from mlx_manager.demo_model import demo_model_path
from mlx_manager.mlx_server.models.catalog import ModelSource

LITTLE = ("-n", "2", "--prompt-tokens", "24", "--output-tokens", "24")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_both_are_measured_in_every_round_and_shown(run, tmp_path: Path) -> None:
    shutil.copytree(demo_model_path(), tmp_path / "secret" / "mine")
    file, model = tmp_path / "mine.json", str(tmp_path / "secret" / "mine")
    done = run("bench", "--share", str(file), "--model", model, *LITTLE)
    assert done.returncode == 0, done.stderr
    text = file.read_text()
    found = json.loads(text)
    assert [each.keys() for each in found["rounds"]] == [{"mlx_manager", "mlx_lm"}] * 2
    assert found["model"]["name"] == "mine"
    assert found["load"]["prompt_tokens"] == 24
    assert found["machine"]["packages"].keys() >= {"mlx", "mlx-lm"}
    for personal in ("secret", str(Path.home()), socket.gethostname()):
        assert personal not in text
    assert "mine" in done.stdout.splitlines()[0]
    assert {"mlx-manager", "mlx-lm", "ratio"} <= {
        line[:11].strip() for line in done.stdout.split("\n")
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("mine.json",), "mine.json is of no use without --share"),
        (("--share", "-c", "4"), "-c is of no use with --share"),
        (("--share", "--rate", "4"), "--rate is of no use with --share"),
        (("--share", "--url", "http://127.0.0.1:1"), "--url is of no use with --share"),
        (("--share", "--json"), "--json is of no use with --share"),
        (("--share", "--output-tokens", "1"), "--output-tokens of 2 or more"),
        (("--share", "/nowhere/mine.json"), "/nowhere is no folder"),
    ],
)
def test_what_can_not_be_meant_is_a_usage_error(run, arguments, words: str) -> None:
    done = run("bench", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_variable_for_other_commands_is_no_mistake(run) -> None:
    url = {"MLX_MANAGER_URL": "http://127.0.0.1:1"}
    done = run("bench", "--share", "--output-tokens", "1", **url)
    assert "--output-tokens of 2 or more" in done.stderr


def test_a_model_that_is_not_here_is_to_be_pulled_first(run) -> None:
    done = run("bench", "--share", "-", "--model", "somebody/some-model")
    assert done.returncode == 4
    assert "mlx-manager pull somebody/some-model" in done.stderr


def test_both_get_the_same_prompts_and_take_turns_at_being_first() -> None:
    called: list[tuple[str, list[int], int]] = []

    def side(name: str, seconds: float):
        def answer(ids: list[int], tokens: int) -> Answer:
            called.append((name, ids, tokens))
            return Answer(seconds * tokens, tokens)

        return answer

    prompts = iter([number] for number in range(100))
    sides = {"mlx_manager": side("mlx_manager", 1), "mlx_lm": side("mlx_lm", 2)}
    rounds = take_turns(sides, lambda: next(prompts), Load(1, 5, 2, 0), lambda _: None)
    assert rounds == [{"mlx_manager": Figures(1, 1), "mlx_lm": Figures(2, 0.5)}] * 2
    first = [called[at][0] for at in range(0, len(called), 4)]
    assert first == ["mlx_lm", "mlx_manager", "mlx_lm"]
    for at in range(0, len(called), 4):
        one, other = called[at : at + 2], called[at + 2 : at + 4]
        assert [call[1:] for call in one] == [call[1:] for call in other]
    assert len({call[1][0] for call in called}) == len(called) / 2


def test_ratios_are_of_rounds_and_not_of_medians() -> None:
    rounds = [
        {"mlx_manager": Figures(1, 10), "mlx_lm": Figures(2, 10)},
        {"mlx_manager": Figures(4, 30), "mlx_lm": Figures(2, 10)},
        {"mlx_manager": Figures(2, 40), "mlx_lm": Figures(2, 10)},
    ]
    found: dict[str, Any] = summary(rounds)
    assert found["first_token_seconds"]["ratio"] == {"median": 1, "least": 0.5, "most": 2}
    assert found["tokens_per_second"]["mlx_manager"] == {"median": 30, "least": 10, "most": 40}


@pytest.mark.parametrize("long", [Answer(2, 1), Answer(1, 8), Answer(0.5, 8)])
def test_answers_that_give_no_rate_give_no_figures(long: Answer) -> None:
    with pytest.raises(ShareFailed, match="no rate"):
        Figures.of(Answer(1, 1), long)


def facts_of(folder: Path, model: str) -> dict[str, Any]:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 1}')
    return model_facts(ModelSource(model, folder, "configured"))


def test_a_model_of_the_hub_is_named_with_its_commit(tmp_path: Path) -> None:
    found = facts_of(tmp_path / "models--a--b" / "snapshots" / COMMIT, "a/b")
    assert found == {"name": "a/b", "revision": COMMIT, "config": {"model_type": "llama"}}


def test_a_folder_is_named_without_its_place(tmp_path: Path) -> None:
    found = facts_of(tmp_path / "mine", str(tmp_path / "mine"))
    assert (found["name"], found["revision"]) == ("mine", None)


def test_the_embedded_model_is_as_old_as_the_program() -> None:
    found = model_facts(ModelSource("mlx-manager/demo", demo_model_path(), "embedded"))
    assert (found["name"], found["revision"]) == ("mlx-manager/demo", __version__)


def test_the_command_can_be_given_to_a_shell() -> None:
    command = command_for("my model", Load(1, 2, 3, 4))
    assert "--model 'my model' --requests 3 --prompt-tokens 1 --output-tokens 2 --seed 4" in command


def test_a_model_that_mlx_lm_does_not_load_is_told_in_its_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with (
        pytest.raises(ShareFailed, match=r"no-such-model|safetensors"),
        stream_generate(tmp_path),
    ):
        pass


def test_answers_have_as_many_tokens_as_are_asked_for() -> None:
    with stream_generate(demo_model_path()) as ask:
        ids = ask({"text": "Hello there", "tokens": 20})["ids"]
        assert len(ids) == 20
        assert ask({"ids": ids, "max_tokens": 40})["tokens"] == 40
