"""Pictures that a person brings: to a chat, to one question, to a load test."""

from __future__ import annotations

import base64
import json
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
from other_server import OtherServer
from pictures import picture
from PIL import Image
from rich.console import Console

from mlx_manager.chat.commands import parse
from mlx_manager.chat.session import Chat, CommandCompleter
from mlx_manager.client import ServerClient
from mlx_manager.pictures import paths_in, read_picture

RED, BLUE = picture(), picture("JPEG", (5, 9), (0, 0, 255))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with pictures."""
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "a blue one.jpg").write_bytes(BLUE)
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / "scan.tiff").write_bytes(b"II*\0" + bytes(20))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Session:
    """A chat whose lines are typed by a test; `said` is what the person has read since."""

    def __init__(self, other: OtherServer) -> None:
        self._out = StringIO()
        self.client = ServerClient(other.url)
        self.chat = Chat(self.client, "m", Console(file=self._out, width=200), {})

    def type(self, line: str) -> str:
        self._out.seek(0)
        self._out.truncate()
        match parse(line):
            case str(question):
                self.chat._ask(question, self.chat.images)
            case command:
                self.chat._obey(command)
        return self._out.getvalue()


@pytest.fixture
def session(other: OtherServer) -> Any:
    typed = Session(other)
    yield typed
    typed.client.close()


def content(shown: Any) -> list[Any]:
    """Texts, and the bytes of pictures, of a message."""
    if isinstance(shown, str):
        return [shown]
    return [
        part["text"]
        if part["type"] == "text"
        else base64.b64decode(part["image_url"]["url"].partition("base64,")[2])
        for part in shown
    ]


def test_a_picture_goes_with_the_next_question_and_stays_in_the_conversation(
    session: Session, other: OtherServer, folder: Path
) -> None:
    assert "With the next question: red.png" in session.type("/image red.png")
    session.type("What is this?")
    assert content(other.bodies[-1]["messages"][0]["content"]) == [RED, "What is this?"]
    session.type("Sure?")
    said = other.bodies[-1]["messages"]
    assert content(said[0]["content"]) == [RED, "What is this?"]
    assert said[2]["content"] == "Sure?"
    assert "data:image/png;base64," in json.dumps(said)


def test_several_pictures_go_in_their_order(
    session: Session, other: OtherServer, folder: Path
) -> None:
    session.type('/image red.png "a blue one.jpg"')
    assert session.type(r"/image a\ blue\ one.jpg").count("blue") == 2
    session.type("Compare.")
    assert content(other.bodies[-1]["messages"][0]["content"]) == [RED, BLUE, BLUE, "Compare."]


def test_pictures_can_be_looked_at_and_taken_back(
    session: Session, other: OtherServer, folder: Path
) -> None:
    assert "No pictures" in session.type("/image")
    session.type("/image red.png")
    assert "red.png" in session.type("/image")
    assert "No pictures" in session.type("/image none")
    session.type("Hello?")
    assert other.bodies[-1]["messages"][0]["content"] == "Hello?"


def test_pictures_stay_for_the_next_question_where_one_fails(
    session: Session, other: OtherServer, folder: Path
) -> None:
    session.type("/image red.png")
    other.status = 400
    assert "/image none takes them back" in session.type("What?")
    other.status = 200
    session.type("What?")
    assert content(other.bodies[-1]["messages"][0]["content"]) == [RED, "What?"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/image absent.png", "absent.png can't be read: No such file"),
        ("/image notes.txt", "notes.txt is no picture; PNG, JPEG, WebP and GIF can be sent"),
        ("/image scan.tiff", "scan.tiff is a TIFF"),
        ("/image .", ". can't be read"),
        ("/image ~nobody-here/a.png", "home folder"),
        ('/image "red.png', "no closing quotation"),
    ],
)
def test_what_is_no_picture_is_said(session: Session, folder: Path, line: str, said: str) -> None:
    assert said in session.type(line)
    assert session.chat.images == ()


def test_a_retry_asks_with_the_same_pictures(
    session: Session, other: OtherServer, folder: Path
) -> None:
    session.type("/image red.png")
    session.type("What?")
    session.type("/image 'a blue one.jpg'")
    session.type("/retry")
    assert content(other.bodies[-1]["messages"][0]["content"]) == [RED, "What?"]
    session.type("And this?")
    assert content(other.bodies[-1]["messages"][2]["content"]) == [BLUE, "And this?"]


def test_a_conversation_with_pictures_is_saved(session: Session, folder: Path) -> None:
    session.type("/image 'a blue one.jpg'")
    session.type("What?")
    session.type("/save chat.md")
    session.type("/save chat.json")
    assert "## User\n\n![a blue one.jpg](<a blue one.jpg>)\n\nWhat?" in Path("chat.md").read_text()
    messages = json.loads(Path("chat.json").read_text())["messages"]
    assert content(messages[0]["content"]) == [BLUE, "What?"]


def test_files_are_completed_after_image(folder: Path) -> None:
    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document

    found = CommandCompleter(list).get_completions(Document("/image re"), CompleteEvent())
    assert [each.text for each in found] == ["d.png"]


def test_one_question_takes_pictures(run: Any, other: OtherServer, folder: Path) -> None:
    asked = ("chat", "--url", other.url, "--system", "Be brief.", "--once", "What?")
    done = run(*asked, "--image", "red.png", "--image", "a blue one.jpg")
    assert done.returncode == 0, done.stderr
    messages = other.bodies[-1]["messages"]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert content(messages[1]["content"]) == [RED, BLUE, "What?"]


@pytest.mark.parametrize("command", [("chat", "--once", "What?"), ("bench",)])
def test_a_file_that_is_no_picture_ends_the_command(
    run: Any, other: OtherServer, folder: Path, command: tuple[str, ...]
) -> None:
    done = run(*command, "--url", other.url, "--image", "notes.txt")
    assert done.returncode == 2
    assert "notes.txt is no picture" in done.stderr
    assert not other.bodies


def test_a_load_test_sends_a_picture_with_each_request_and_none_twice(
    run: Any, other: OtherServer, folder: Path
) -> None:
    shown = ("--image", "red.png", "--image", "a blue one.jpg")
    done = run("bench", "--url", other.url, "-n", "12", "-c", "2", *shown, "--json")
    assert done.returncode == 0, done.stderr
    pictures = [content(body["messages"][0]["content"])[0] for body in other.bodies]
    assert len(set(pictures)) == len(pictures) >= 12
    assert {Image.open(BytesIO(each)).size for each in pictures} == {(12, 8), (5, 9)}


def test_paths_are_read_as_a_person_writes_them(folder: Path) -> None:
    assert paths_in("a blue one.jpg") == [Path("a blue one.jpg")]
    assert paths_in("'a blue one.jpg' red.png") == [Path("a blue one.jpg"), Path("red.png")]
    assert BLUE[:9] not in repr(read_picture(Path("red.png"))).encode()
