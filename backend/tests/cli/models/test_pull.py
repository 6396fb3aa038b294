"""Downloads from a hub of our own: what is fetched, what is refused, what a person is told."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub, fake_hub
from small_disk import small_disk
from thorough import one_in_turn, slow
from tiny_models import add_mtp_head, make_tiny_model

from mlx_manager.cli.models.pull import advice, check_architecture, repository_named
from mlx_manager.demo_model import demo_model_path
from mlx_manager.mlx_server.models.hub import Repository


@pytest.fixture
def hub(environment: dict[str, str]) -> Iterator[FakeHub]:
    with fake_hub(demo_model_path()) as hub:
        environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        yield hub


def folder_of(tmp_path: Path, name: str = "own--demo") -> Path:
    return tmp_path / "hf" / "hub" / f"models--{name}" / "snapshots" / COMMIT


def test_what_was_pulled_is_served(program, hub: FakeHub, tmp_path: Path) -> None:
    done = program("pull", "own/demo")
    assert done.returncode == 0
    assert done.stdout == f"{folder_of(tmp_path)}\n"
    assert re.search(r"[0-9.]+ MB, licence apache-2.0", done.stderr)
    question = ("--once", "How do I change the port?", "--temperature", "0")
    answer = program("chat", "--model", "own/demo", *question)
    assert "9000" in answer.stdout
    hub.fetched.clear()
    again = program("pull", "own/demo", "--json")
    assert json.loads(again.stdout)["bytes_to_download"] == 0
    assert hub.fetched == []


def test_a_dry_run_says_whether_it_fits(program, hub: FakeHub) -> None:
    fits = program("pull", "own/demo", "--dry-run", MLX_SERVER_MEMORY_LIMIT_GB="1GB")
    assert re.search(r"It fits: .* a token leave room for [\d,]+ tokens, or", fits.stderr)
    small = program("pull", "own/demo", "--dry-run", MLX_SERVER_MEMORY_LIMIT_GB="1MB")
    assert "It does not fit: 8.07 MB of weights, 1.00 MB for models" in small.stderr


def test_the_hub_is_searched(program, hub: FakeHub) -> None:
    shown = program("search", "llama", "4bit")
    assert "one/llama-4bit" in shown.stdout
    assert "apache-2.0" in shown.stdout
    assert "pull --dry-run one/llama-4bit" in shown.stderr
    found = json.loads(program("search", "llama", "--json").stdout)
    assert [model["id"] for model in found] == ["one/llama", "other/llama"]


def test_serve_says_what_models_would_take(program, models_dir: Path) -> None:
    shown = program("serve", "--plan", "--models-dir", str(models_dir), "--memory-limit-gb", "1")
    assert shown.returncode == 0
    assert re.search(
        r"^mine +yes +8.07 MB +8,192 +2.50 kB +[\d,]+ +50$", shown.stdout, re.MULTILINE
    )


MODEL = "mlx-community/Qwen3-8B-4bit"
PASTED = [
    MODEL,
    f"https://huggingface.co/{MODEL}",
    f"http://www.huggingface.co/{MODEL}/",
    f"https://hf.co/{MODEL}?library=mlx-lm",
    f"HTTPS://HuggingFace.co/{MODEL}#use",
    f"https://huggingface.co/{MODEL}/tree/main",
    f"https://huggingface.co/{MODEL}/blob/main/config.json?download=true",
    f"https://huggingface.co/{MODEL}/resolve/main/model.safetensors",
    f"https://huggingface.co/{MODEL}/discussions/3",
    f"https://huggingface.co/{MODEL}.git",
    f"huggingface.co/{MODEL}",
    f"hf.co/{MODEL}/tree/main",
    f" <https://huggingface.co/{MODEL}> ",
    f"https://hub.example:8443/{MODEL}/tree/main",
    f"hub.example:8443/{MODEL}",
]


@pytest.mark.parametrize("pasted", PASTED)
def test_a_pasted_address_is_its_repository(pasted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example:8443/")
    assert repository_named(pasted) == MODEL


@pytest.mark.parametrize(
    ("pasted", "why"),
    [
        ("https://ollama.com/library/llama3", "not from ollama.com"),
        (f"https://huggingface.co.evil.example/{MODEL}", "not from huggingface.co.evil.example"),
        (f"https://user@huggingface.co/{MODEL}", "not from user@huggingface.co"),
        (f"ftp://huggingface.co/{MODEL}", "not from huggingface.co"),
        ("file:///etc/passwd", "models are pulled from huggingface.co"),
        ("https://huggingface.co/datasets/owner/data", "begins with datasets/"),
        ("https://huggingface.co/spaces/owner/space", "begins with spaces/"),
        ("https://huggingface.co/mlx-community", "names no model"),
        ("https://huggingface.co/", "names no model"),
        ("hf.co", "names no model"),
        (f"https://huggingface.co/{MODEL}/tree/dev", "revision dev"),
        (f"https://huggingface.co/{MODEL}/blob/c0ffee/config.json", "revision c0ffee"),
    ],
)
def test_an_address_of_no_model_is_refused_by_name(run, pasted: str, why: str) -> None:
    done = run("pull", pasted)
    assert done.returncode == 2
    assert why in done.stderr


def test_what_was_pasted_is_pulled(program, hub: FakeHub, tmp_path: Path) -> None:
    done = program("pull", f"{hub.url}/own/demo/blob/main/config.json?x=1")
    assert done.stdout == f"{folder_of(tmp_path)}\n"


def test_a_chat_shows_how_its_model_is_fetched(program, hub: FakeHub) -> None:
    question = ("--once", "How do I change the port?", "--temperature", "0")
    done = program("chat", "--model", "own/demo", *question)
    assert "9000" in done.stdout
    assert re.search(r"[0-9.]+ MB, licence apache-2.0", done.stderr)
    assert "model.safetensors" in hub.fetched


@slow
def test_a_chat_with_a_model_that_is_here_says_nothing_of_fetching(program, hub: FakeHub) -> None:
    assert program("pull", "own/demo").returncode == 0
    done = program("chat", "--model", "own/demo", "--once", "Hello!", "--temperature", "0")
    assert done.stdout
    assert "licence" not in done.stderr


def test_a_chat_with_a_model_that_the_hub_refuses_says_so_as_pull_does(
    program, hub: FakeHub
) -> None:
    hub.gated = True
    asked = program("chat", "--model", "own/demo", "--once", "hi")
    pulled = program("pull", "own/demo")
    assert asked.returncode == pulled.returncode != 0
    assert pulled.stderr.splitlines()[-1].removeprefix("mlx-manager: ") in asked.stderr


def test_of_a_new_commit_only_what_has_changed_is_to_come(program, tmp_path: Path, environment):
    folder = tmp_path / "demo"
    shutil.copytree(demo_model_path(), folder)
    with fake_hub(folder) as hub:
        environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        assert program("pull", "own/demo").returncode == 0
        hub.commit = hub.commit[::-1]
        config = folder / "config.json"
        config.write_text(f"{config.read_text()}\n")
        hub.fetched.clear()
        done = program("pull", "own/demo", "--json")
    assert json.loads(done.stdout)["bytes_to_download"] == config.stat().st_size
    assert hub.fetched == ["config.json"]
    assert done.stdout.count(hub.commit) == 2


def sharded(folder: Path, *others: str) -> Path:
    """The demo with an index to two shards of it and a sidecar, and `others` that it names not."""
    shutil.copytree(demo_model_path(), folder)
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (folder / "model.safetensors").rename(folder / shards[0])
    placed = {"a": shards[0], "b": shards[1], "mtp.fc.weight": "mtp.safetensors"}
    for name in (*shards[1:], "mtp.safetensors", *others):
        (folder / name).write_bytes(name.encode() * 100)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    return folder


def test_what_the_index_names_is_fetched_and_no_other_weights(
    program, tmp_path: Path, environment
) -> None:
    others = ["model.safetensors", "model-00003-of-00003.safetensors", "consolidated.safetensors"]
    folder = sharded(tmp_path / "sharded", *others)
    with fake_hub(folder) as hub:
        environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        told = json.loads(program("pull", "own/demo", "--json").stdout)
        there = [file for file in folder.iterdir() if file.is_file()]
        assert {*hub.fetched} == {file.name for file in there} - {*others, "README.md"}
        wanted = [file for file in there if file.name in hub.fetched]
        assert told["bytes_to_download"] == sum(file.stat().st_size for file in wanted)
        assert (folder_of(tmp_path) / "mtp.safetensors").is_file()
        hub.fetched.clear()
        again = program("pull", "own/demo", "--json")
        assert json.loads(again.stdout)["bytes_to_download"] == 0
        assert hub.fetched == []


def test_an_index_that_names_what_the_hub_has_not_is_refused(
    program, tmp_path: Path, environment
) -> None:
    folder = sharded(tmp_path / "sharded")
    (folder / "mtp.safetensors").unlink()
    with fake_hub(folder) as hub:
        done = program("pull", "own/demo", HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0")
    assert done.returncode != 0
    assert "own/demo has no mtp.safetensors, which its model.safetensors.index.json names" in (
        done.stderr
    )


def test_a_cut_connection_is_taken_up_where_it_broke(program, tmp_path: Path, environment) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    content = bytes(range(256)) * 100_000
    (folder / "model.safetensors").write_bytes(content)
    with fake_hub(folder) as hub:
        hub.cuts = 1
        done = program("pull", "own/large", HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0")
    assert done.returncode == 0
    # The client writes pieces of ten megabytes.
    assert hub.ranges == [f"bytes={10 * 2**20}-"]
    assert (folder_of(tmp_path, "own--large") / "model.safetensors").read_bytes() == content
    assert "going on where it did" in done.stderr


def held_pull(hub: FakeHub, environment: dict[str, str]) -> subprocess.Popen[str]:
    """A pull that has every file but the weights, of which the hub sends no more."""
    hub.held = threading.Event()
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_manager.cli", "pull", "own/demo"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    while "tokenizer.json" not in hub.fetched or "model.safetensors" not in hub.fetched:
        assert process.poll() is None
    return process


def test_ctrl_c_ends_the_download_and_keeps_whole_files(
    hub: FakeHub, environment: dict[str, str], tmp_path: Path
) -> None:
    process = held_pull(hub, environment)
    process.send_signal(signal.SIGINT)
    assert hub.held is not None
    hub.held.set()
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "pull again to go on" in said
    assert list(tmp_path.rglob("*.incomplete")) == []


def test_ctrl_c_twice_ends_the_download_at_once_while_the_hub_sends_nothing(
    hub: FakeHub, environment: dict[str, str]
) -> None:
    process = held_pull(hub, environment)
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    for line in process.stderr:
        if "once more" in line:
            break
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert hub.held is not None
    assert not hub.held.is_set()
    assert process.returncode == 130
    assert "pull again to go on" in said


def test_what_a_killed_download_left_is_gone_after_a_later_one(
    program, hub: FakeHub, environment: dict[str, str], tmp_path: Path
) -> None:
    process = held_pull(hub, environment)
    process.kill()
    process.communicate()
    assert hub.held is not None
    hub.held.set()
    hub.held = None
    parts = list(tmp_path.rglob("*.incomplete"))
    assert parts
    for part in parts:
        os.utime(part, (0, 0))
    somebody_elses = parts[0].with_name(f"{'0' * 40}.01234567.incomplete")
    somebody_elses.touch()
    assert program("pull", "own/demo").returncode == 0
    assert list(tmp_path.rglob("*.incomplete")) == [somebody_elses]


def test_json_says_what_is_fetched_and_a_dry_run_what_would_be(
    program, hub: FakeHub, tmp_path: Path
) -> None:
    planned = json.loads(program("pull", "own/demo", "--dry-run", "--json").stdout)
    assert planned["path"] is None
    assert planned["fits"]
    assert planned["tokens"] == (planned["limit"] - planned["weights"]) // planned["token_bytes"]
    # It is read, and not kept.
    assert hub.fetched == ["config.json"]
    done = program("pull", "own/demo", "--json")
    said = json.loads(done.stdout)
    assert said["path"] == str(folder_of(tmp_path))
    assert said["files"].keys() == hub.files().keys() - {"README.md"}
    assert said["bytes_to_download"] == said["bytes"] == sum(said["files"].values())
    assert said["licence"] == "apache-2.0"


def test_a_model_that_the_disk_has_no_room_for_is_not_begun(program, hub: FakeHub) -> None:
    hub.sizes["model.safetensors"] = 10**18
    done = program("pull", "own/demo")
    assert done.returncode == 1
    assert "909,495 TB more" in done.stderr
    assert "HF_HOME" in done.stderr
    assert hub.fetched == []


def test_a_disk_that_fills_up_meanwhile_is_told_and_the_next_pull_goes_on(
    hub: FakeHub, environment: dict[str, str], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 16_000) as disk:
        pull = [*disk.command, sys.executable, "-m", "mlx_manager.cli", "pull", "own/demo"]
        inside = environment | {"HF_HOME": str(disk.folder / "hf")}
        hub.held = threading.Event()
        process = subprocess.Popen(pull, env=inside, stderr=subprocess.PIPE, text=True)
        while "model.safetensors" not in hub.fetched:
            assert process.poll() is None
        with disk.full():
            hub.held.set()
            said = process.communicate(timeout=60)[1]
        assert process.returncode == 1
        assert "The disk filled up while own/demo was downloaded" in said
        assert "Traceback" not in said
        hub.held = None
        again = subprocess.run(pull, env=inside, capture_output=True, text=True, check=False)
        assert again.returncode == 0
        weights = disk.outside / again.stdout.strip().removeprefix(f"{disk.folder}/")
        assert (weights / "model.safetensors").stat().st_size > 8_000_000


def test_a_gated_model_says_where_its_terms_are(program, hub: FakeHub) -> None:
    hub.gated = True
    done = program("pull", "own/demo")
    assert done.returncode == 5
    assert "accept its terms at https://huggingface.co/own/demo" in done.stderr
    assert "HF_TOKEN" in done.stderr


@pytest.mark.parametrize(
    ("name", "variables", "code", "words"),
    [
        ("own/missing", {}, 4, "no repository"),
        ("../etc", {}, 4, "no repository"),
        ("own/broken", {}, 1, "could not be downloaded"),
        ("own/demo", {"HF_HUB_OFFLINE": "1"}, 1, "HF_HUB_OFFLINE is set"),
        ("own/demo", {"HF_ENDPOINT": "http://127.0.0.1:1"}, 1, "Check the network"),
        ("own/demo", {"HF_TOKEN": "hf_schlüssel"}, 1, "Check HF_TOKEN"),
        ("own/demo", {"ALL_PROXY": "socks5://127.0.0.1:1"}, 1, "the proxy's variables"),
    ],
)
def test_refusals_say_what_to_do(
    program, hub: FakeHub, name: str, variables: dict[str, str], code: int, words: str
) -> None:
    done = program("pull", name, **variables)
    assert done.returncode == code
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("answer", [[], {}, {"id": "own/demo", "siblings": [{}]}, "x"])
def test_a_hub_that_answers_as_none_does_is_told_as_such(
    program, hub: FakeHub, answer: object
) -> None:
    hub.strange = answer
    done = program("pull", "own/demo")
    assert done.returncode == 1, done.stderr
    assert f"{hub.url} does not answer as the Hugging Face hub does" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "address"),
    one_in_turn(
        ["pull own/demo", "list", "doctor", "serve", "rm own/demo"],
        ["http://[", "http://127.0.0.1:x"],
    ),
)
def test_a_hubs_address_that_is_none_is_a_usage_error(program, command: str, address: str) -> None:
    done = program(*command.split(), HF_ENDPOINT=address)
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"mlx-manager: HF_ENDPOINT: {address} is no address such as https://huggingface.co.\n"
    )


def test_what_cannot_be_served_is_not_fetched_unless_wanted(program, tmp_path: Path, environment):
    folder = tmp_path / "strange"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "strange"}')
    with fake_hub(folder) as hub:
        environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        done = program("pull", "own/strange")
        assert done.returncode == 5
        assert "model*.safetensors" in done.stderr
        (folder / "model.safetensors").touch()
        done = program("pull", "own/strange")
        assert done.returncode == 5
        assert "no architecture 'strange'" in done.stderr
        assert program("pull", "own/strange", "--anyway").returncode == 0


def repository(name: str, model_type: str) -> Repository:
    return Repository(name, "main", {}, "", gated=False, model_type=model_type)


def test_pull_says_whether_a_models_mtp_head_is_there(tmp_path: Path) -> None:
    found = repository("own/glm-4bit", "glm4_moe_lite")
    folder = make_tiny_model(tmp_path / "glm", "glm4_moe_lite")
    assert 'mlx-manager search "glm MTP"' in advice(found, folder)
    add_mtp_head(folder)
    assert "Its MTP head is there" in advice(found, folder)
    head = repository("own/glm-MTP-4bit", "glm4_moe_lite_mtp")
    assert 'mtp = "own/glm-MTP-4bit"' in advice(head, folder)
    check_architecture(head, anyway=False)
    llama = make_tiny_model(tmp_path / "llama", "llama")
    assert "MTP" not in advice(repository("own/llama", "llama"), llama)
