from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from here import served_here
from live import PROGRAM, live_server
from observability.test_metrics import Scrape
from scripted import ScriptedBackend, ScriptedPool, says
from small_disk import small_disk

from mlx_manager.mlx_server.config import AuditLimits, MLXServerSettings
from mlx_manager.mlx_server.core import (
    Caller,
    Finished,
    GenerationRequest,
    Started,
    Text,
    TextDelta,
    Usage,
)
from mlx_manager.mlx_server.engine.stream import UNREAD, steps
from mlx_manager.mlx_server.errors import GenerationFailed, MLXManagerError
from mlx_manager.mlx_server.main import create_app
from mlx_manager.mlx_server.observability.observer import Recorder
from mlx_manager.mlx_server.services.audit import AuditEntry, AuditLog
from mlx_manager.mlx_server.services.inference import Inference
from mlx_manager.mlx_server.timeline import RowTimeline, Timeline

MODEL = "mlx-manager/demo"
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}
DAY = 86400.0


def record(arrived: float = 1000.0, key: str = "alice", model: str = MODEL) -> Timeline:
    row = RowTimeline(None, Started(7, 4), 0.5, Finished("stop", Usage(7, 3, 4)), 1.0)
    caller = Caller(key, "chat", f"req-{arrived}")
    return Timeline(model, caller, (row,), arrived=arrived, leased=0.0, seconds=1.25)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lost() -> list[int]:
    return []


@pytest.fixture
def audit(tmp_path: Path, clock: Clock, lost: list[int]) -> Iterator[AuditLog]:
    limits = AuditLimits(tmp_path / "audit.db", max_bytes=64 * 1024, max_age=30 * DAY)
    with closing(AuditLog(limits, lost.append, clock)) as found:
        yield found


async def test_a_call_is_kept_as_it_was(audit: AuditLog) -> None:
    audit.put(record())
    entry = AuditEntry(1, 1000.0, "req-1000.0", "alice", MODEL, "chat", 1, 7, 4, 3, 1.25, "stop")
    assert await audit.entries() == [entry]


async def test_the_newest_come_first_and_can_be_chosen(audit: AuditLog) -> None:
    for began in range(1000, 1006):
        audit.put(record(began, "bob" if began % 2 else "alice"))
    assert [entry.time for entry in await audit.entries(limit=2)] == [1005, 1004]
    assert [entry.time for entry in await audit.entries(key="alice")] == [1004, 1002, 1000]
    assert [entry.time for entry in await audit.entries(since=1004)] == [1005, 1004]
    assert await audit.entries(key="nobody") == []
    newest, second = await audit.entries(limit=2)
    assert [entry.time for entry in await audit.entries(limit=2, before=second.id)] == [1003, 1002]
    assert [entry.time for entry in await audit.entries(key="bob", before=newest.id)] == [
        1003,
        1001,
    ]


async def test_old_calls_are_forgotten(audit: AuditLog, clock: Clock) -> None:
    audit.put(record(1000))
    audit.put(record(1000 + DAY))
    await audit.entries()
    clock.now = 1000 + 30 * DAY + 1
    assert [entry.time for entry in await audit.entries()] == [1000 + DAY]


async def test_the_file_stays_within_its_size(audit: AuditLog, tmp_path: Path) -> None:
    for began in range(1000, 3000):
        audit.put(record(began))
    entries = await audit.entries(limit=5000)
    assert 100 < len(entries) < 2000
    assert entries[0].time == 2999
    assert (tmp_path / "audit.db").stat().st_size <= 2 * 64 * 1024 + 2000 * 200
    audit.put(record(3000))
    assert (await audit.entries(limit=1))[0].time == 3000


async def test_it_is_there_again_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    limits = AuditLimits(tmp_path / "audit.db")
    with closing(AuditLog(limits, [].append, clock)) as first:
        first.put(record())
    with closing(AuditLog(limits, [].append, clock)) as second:
        assert len(await second.entries()) == 1


async def test_a_name_of_any_length_takes_little_room(audit: AuditLog) -> None:
    audit.put(record(model="x" * 1_000_000))
    [entry] = await audit.entries()
    assert len(entry.model) == 256


async def test_what_cannot_be_written_is_counted_told_once_and_hinders_nobody(
    audit: AuditLog, lost: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit.put(record(1000))
    await audit.entries()
    with closing(sqlite3.connect(tmp_path / "audit.db")) as other:
        other.execute("ALTER TABLE calls RENAME TO away")
        for began in (1001, 1002):
            audit.put(record(began))
            with pytest.raises(MLXManagerError, match="can't be used"):
                await audit.entries()
        assert lost == [1, 1]
        other.execute("ALTER TABLE away RENAME TO calls")
        audit.put(record(1003))
        assert [entry.time for entry in await audit.entries()] == [1003, 1000]
    assert caplog.text.count("can't be written") == 1
    assert "lacks 2 calls" in caplog.text


async def test_failures_and_hang_ups_are_outcomes(audit: AuditLog, clock: Clock) -> None:
    clock.now = 0.0
    failing = ScriptedPool(ScriptedBackend(lambda _: [[Started(1)], GenerationFailed("x")]))
    requests = [GenerationRequest(MODEL, Text("x"))]
    with pytest.raises(GenerationFailed):
        await Inference(failing, [Recorder([audit.put])]).generate(requests).run(UNREAD)
    fine = ScriptedPool(ScriptedBackend(lambda _: says("Hel", "lo")))
    left = steps(Inference(fine, [Recorder([audit.put])]).generate(requests).run)
    await anext(left)
    await left.aclose()
    assert [entry.outcome for entry in await audit.entries()] == ["cancelled", "generation_failed"]


async def test_what_a_call_had_answered_when_it_was_cut_off_counts(
    audit: AuditLog, clock: Clock
) -> None:
    clock.now = 0.0
    # One of the tokens has no text, as a part of a character has none.
    script = [[Started(7)], [TextDelta("one")], 2, [TextDelta("two")], GenerationFailed("x")]
    pool = ScriptedPool(ScriptedBackend(lambda _: script))
    asked = [GenerationRequest(MODEL, Text("x"))]
    with pytest.raises(GenerationFailed):
        await Inference(pool, [Recorder([audit.put])]).generate(asked).run(UNREAD)
    [entry] = await audit.entries()
    assert (entry.prompt_tokens, entry.completion_tokens) == (7, 3)


def test_a_file_that_is_no_database_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "audit.db").write_text("no database " * 100)
    with pytest.raises(MLXManagerError, match=r"MLX_SERVER_AUDIT_LOG: .* can't be used"):
        create_app(MLXServerSettings(audit_log=tmp_path / "audit.db"))


def test_a_full_disk_costs_no_answer(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with small_disk(tmp_path / "disk", 256) as disk:
        path = disk.folder / "audit.db"
        command = (*disk.command, str(PROGRAM), "serve")
        with (
            live_server(log, command, audit_log=path, log_level="warning") as server,
            httpx.Client(base_url=server.url, timeout=60) as client,
        ):

            def ask(*names: str) -> None:
                for name in names:
                    headers = {"x-request-id": name}
                    client.post(CHAT, json=HELLO, headers=headers).raise_for_status()

            def kept() -> list[str]:
                entries = client.get("/v1/admin/audit").raise_for_status().json()["data"]
                return [entry["request_id"] for entry in entries]

            ask("first", "second")
            assert kept() == ["second", "first"]
            with disk.full():
                ask("lost", "lost-too")
                assert kept() == ["second", "first"]
            ask("third")
            assert kept() == ["third", "second", "first"]
            metrics = Scrape(client.get("/metrics").text)
            assert metrics.get("audit_records_lost_total") == 2
        copy = tmp_path / "audit.db"
        copy.write_bytes((disk.outside / "audit.db").read_bytes())
    said = log.read_text()
    assert "can't be written to the audit log, and are lost" in said
    assert "the audit log works again; it lacks 2 calls" in said
    with closing(sqlite3.connect(copy)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_the_owner_reads_it_over_http(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "audit.db"
    keyed = {"admin_token": "the-owner", "api_key": "sk-secret-of-the-caller"}
    with served_here(audit_log=path, **keyed) as client:
        caller = {"authorization": "Bearer sk-secret-of-the-caller", "x-request-id": "mine-1"}
        body = client.post(CHAT, json=HELLO | {"n": 2}, headers=caller).raise_for_status().json()
        client.post("/v1/messages", json=HELLO | {"model": "nobody/knows-it"}, headers=caller)
        owner = {"authorization": "Bearer the-owner"}
        audit = "/v1/admin/audit"
        failed, answered = client.get(audit, headers=owner).json()["data"]
        assert client.get(audit, headers=caller).status_code == 401
        assert client.get(audit, params={"limit": 0}, headers=owner).status_code == 400
        for params, found in (
            ({"limit": 1}, [failed]),
            ({"key": "nobody"}, []),
            ({"key": answered["key"]}, [failed, answered]),
            ({"since": "2100-01-01T00:00:00"}, []),
            ({"since": failed["time"]}, [failed]),
            ({"before": failed["id"]}, [answered]),
            ({"before": answered["id"]}, []),
        ):
            assert client.get(audit, params=params, headers=owner).json()["data"] == found
    usage = body["usage"]
    assert answered["request_id"] == "mine-1"
    assert answered["protocol"] == "chat"
    assert answered["answers"] == 2
    assert answered["prompt_tokens"] == usage["prompt_tokens"]
    assert answered["completion_tokens"] == usage["completion_tokens"]
    assert answered["key"]
    assert failed["outcome"] == "model_not_found"
    assert f"POST {CHAT} 200" in caplog.text
    kept = path.read_bytes() + caplog.text.encode()
    assert b"Hello!" not in kept
    assert b"sk-secret-of-the-caller" not in kept
