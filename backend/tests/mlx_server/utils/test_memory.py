from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from weakref import ref

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.utils import memory
from mlx_manager.mlx_server.utils.memory import Ledger, Relief, cgroup_limits


def empty_cache_ledger(limit: int) -> Ledger:
    return Ledger(limit, cache_bytes=lambda: 0, drop_cache=lambda: None)


def test_usage_counts_an_array_and_leaves_the_limit_alone():
    before = memory.get_memory_usage()
    array = mx.ones((256, 1024))
    mx.eval(array)
    after = memory.get_memory_usage()
    assert after["active"] - before["active"] == array.nbytes
    assert after["limit"] == before["limit"] > 0
    assert after["peak"] >= after["active"]


def test_a_limit_that_was_set_can_be_undone():
    before = memory.get_memory_usage()["limit"]
    undo = memory.set_memory_limit(10**9)
    assert memory.get_memory_usage()["limit"] == 10**9
    undo()
    assert memory.get_memory_usage()["limit"] == before


@pytest.fixture
def mac(monkeypatch) -> list[tuple[str, int]]:
    """Limits of a Mac whose GPU recommends 48 GB, as they are set."""
    limits: list[tuple[str, int]] = []

    def setting(name: str) -> Callable[[int], int]:
        return lambda nbytes: limits.append((name, nbytes)) or 0

    for name in ("memory", "cache", "wired"):
        monkeypatch.setattr(mx, f"set_{name}_limit", setting(name))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(devices, "current", lambda: devices.METAL)
    found = {"max_recommended_working_set_size": 48 * 10**9}
    monkeypatch.setattr(mx, "device_info", lambda: found)
    return limits


def test_a_macs_memory_is_not_wired_and_little_of_it_kept_for_reuse(mac):
    undo = memory.set_memory_limit(40 * 10**9)
    assert mac == [("memory", 40 * 10**9), ("cache", 5 * 10**9)]
    undo()
    assert mac[2:] == [("memory", 0), ("cache", 0)]


def test_an_owner_may_have_the_weights_wired_and_no_more_than_the_device_recommends(mac):
    memory.wire(16 * 10**9)
    memory.wire(60 * 10**9)
    memory.wire(0)
    assert mac == [("wired", 16 * 10**9), ("wired", 48 * 10**9), ("wired", 0)]


@pytest.mark.skipif(mx.metal.is_available(), reason="there it is")
def test_elsewhere_nothing_is_wired_nor_the_cache_limited(monkeypatch, mlx_limit):
    for name in ("set_wired_limit", "set_cache_limit"):
        monkeypatch.setattr(mx, name, None)
    memory.set_memory_limit(10**9)()
    memory.wire(10**9)


def test_clear_cache_empties_the_buffer_cache():
    array = mx.ones((256, 1024))
    mx.eval(array)
    del array
    memory.clear_cache()
    assert memory.get_memory_usage()["cache"] == 0


@pytest.mark.skipif(mx.cuda.is_available(), reason="others may have some of an NVIDIA GPU's")
def test_default_limit_is_nine_tenths_of_the_device():
    assert memory.default_limit() == int(0.9 * memory.device_memory()) > 0


class OwnMemory:
    """The driver of a GPU that has memory of its own."""

    def attribute(self, number: int) -> int:
        assert number == 18
        return 0


class MachinesMemory(OwnMemory):
    def attribute(self, number: int) -> int:
        return 1


class NoDriver:
    def __init__(self) -> None:
        raise OSError("there is no libcuda.so.1")


@pytest.fixture
def gpu(monkeypatch) -> None:
    """One of 100 GB, 60 of them free, of which MLX has 8 and keeps 2 more."""
    found = {"total_memory": 100 * 10**9, "free_memory": 60 * 10**9}
    monkeypatch.setattr(memory.mx, "device_info", lambda: found)
    monkeypatch.setattr(memory.mx, "get_active_memory", lambda: 8 * 10**9)
    monkeypatch.setattr(memory.mx, "get_cache_memory", lambda: 2 * 10**9)
    monkeypatch.setattr(memory, "Driver", OwnMemory)


def test_what_other_programs_have_of_a_gpu_is_not_given_out(gpu):
    assert memory.taken_by_others() == 30 * 10**9
    assert memory.default_limit() == 60 * 10**9


def test_a_gpu_that_others_have_filled_has_nothing_to_give(gpu, monkeypatch):
    full = {"total_memory": 100 * 10**9, "free_memory": 0}
    monkeypatch.setattr(memory.mx, "device_info", lambda: full)
    assert memory.default_limit() == 0


@pytest.mark.parametrize("driver", [MachinesMemory, NoDriver])
def test_what_others_have_of_a_machines_memory_may_be_a_cache(gpu, monkeypatch, driver):
    monkeypatch.setattr(memory, "Driver", driver)
    assert memory.taken_by_others() == 0
    assert memory.default_limit() == 90 * 10**9


def test_a_device_that_has_no_more_memory_is_promised_no_more_than_it_had(gpu, mlx_limit, caplog):
    mx.set_memory_limit(91 * 10**9)
    ledger = Ledger(90 * 10**9, cache_bytes=lambda: 0, drop_cache=lambda: None)
    ledger.heed(RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"))
    assert ledger.limit == ledger.available() == 70 * 10**9 - 2**30
    assert mx.get_memory_limit() == 71 * 10**9 - 2**30
    assert "Other programs use it, too" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "[METAL] Command buffer execution failed: Insufficient Memory "
        "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory).",
        "[malloc] Unable to allocate 1073741824 bytes.",
        "[metal::malloc] Resource limit (499000) exceeded.",
    ],
)
def test_metals_words_for_it_are_known(mac, text):
    dropped = []
    ledger = Ledger(48 * 10**9, cache_bytes=lambda: 0, drop_cache=lambda: dropped.append(1))
    assert ledger.heed(RuntimeError(text))
    assert ledger.limit == 48 * 10**9 - 2**30
    assert dropped


@pytest.mark.parametrize(
    "text",
    [
        "[METAL] Command buffer execution failed: Caused GPU Timeout Error "
        "(00000002:kIOGPUCommandBufferCallbackErrorTimeout).",
        "[metal::malloc] Attempting to allocate 40000000000 bytes which is greater than the "
        "maximum allowed buffer size of 20000000000 bytes.",
    ],
)
def test_other_errors_of_metal_say_nothing_of_memory(mac, text):
    ledger = Ledger(48 * 10**9, cache_bytes=lambda: 0, drop_cache=lambda: None)
    assert not ledger.heed(RuntimeError(text))
    assert ledger.limit == 48 * 10**9


def test_a_device_that_others_have_filled_to_the_brim_has_nothing_to_promise(
    gpu, mlx_limit, monkeypatch
):
    monkeypatch.setattr(memory, "taken_by_others", lambda: 100 * 10**9)
    ledger = Ledger(90 * 10**9, cache_bytes=lambda: 0, drop_cache=lambda: None)
    ledger.heed(RuntimeError("out of memory"))
    assert ledger.available() == 0


def test_an_array_that_is_too_large_for_any_device_leaves_the_limit_alone(gpu):
    ledger = Ledger(60 * 10**9, cache_bytes=lambda: 0, drop_cache=lambda: None)
    before = mx.get_memory_limit()
    ledger.heed(RuntimeError("out of memory"))
    assert (ledger.limit, mx.get_memory_limit()) == (60 * 10**9, before)


def test_other_failures_say_nothing_of_memory(gpu):
    ledger = Ledger(90 * 10**9, cache_bytes=lambda: 0, drop_cache=lambda: None)
    ledger.heed(ValueError("no such token"))
    assert ledger.limit == 90 * 10**9


def test_cgroup_limits_are_read_from_the_process_and_its_ancestors(tmp_path: Path):
    leaf = tmp_path / "a" / "b"
    leaf.mkdir(parents=True)
    (leaf / "memory.max").write_text("max\n")
    (leaf.parent / "memory.max").write_text("1000\n")
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("2000\n")
    membership = tmp_path / "cgroup"
    membership.write_text("9:cpu:/x\n4:memory:/seen/by/the/host/only\n0::/a/b\n")
    assert sorted(cgroup_limits(tmp_path, membership)) == [1000, 2000]


def test_no_cgroups_no_limits(tmp_path: Path):
    assert list(cgroup_limits(tmp_path, tmp_path / "absent")) == []


def test_reserve_grants_up_to_the_limit_and_not_beyond():
    ledger = empty_cache_ledger(100)
    assert ledger.reserve("weights:a", 60)
    assert ledger.reserve("pages:a", 40)
    assert not ledger.reserve("pages:a", 1)
    assert ledger.figures() == {
        "weights:a": 60,
        "pages:a": 40,
        "buffer_cache": 0,
        "limit": 100,
        "available": 0,
    }


def test_relief_runs_by_rank_and_stops_once_there_is_room():
    ledger = empty_cache_ledger(100)
    ledger.reserve("weights:idle", 50)
    ledger.reserve("pages:a", 50)
    called: list[tuple[str, int]] = []

    def evict_model(lacking: int) -> None:
        called.append(("model", lacking))
        ledger.release("weights:idle", 50)

    def drop_pages(lacking: int) -> None:
        called.append(("pages", lacking))
        ledger.release("pages:a", 10)

    ledger.add_relief(Relief.IDLE_MODELS, evict_model)
    ledger.add_relief(Relief.PAGES, drop_pages)
    assert ledger.reserve("working:a", 10)
    assert called == [("pages", 10)]
    assert ledger.reserve("working:a", 30)
    assert called == [("pages", 10), ("pages", 30), ("model", 20)]
    ledger.remove_relief(evict_model)
    assert not ledger.reserve("working:a", 100)
    assert [name for name, _ in called[3:]] == ["pages"]


def test_who_goes_to_make_room_is_gone_before_the_room_is_given_out():
    class Model:
        def free(self, lacking: int) -> None:
            """Has nothing to spare but itself."""

    ledger = Ledger(100, cache_bytes=lambda: 0)
    models = [Model()]
    alive = ref(models[0])
    left: list[Model | None] = []

    def evict(lacking: int) -> None:
        ledger.remove_relief(models[0].free)
        models.clear()
        left.append(alive())
        ledger.release("weights:old", 80)

    ledger.add_relief(Relief.PAGES, models[0].free)
    ledger.add_relief(Relief.IDLE_MODELS, evict)
    assert ledger.reserve("weights:old", 80)
    assert ledger.reserve("weights:new", 50)
    assert left == [None]


def test_buffer_cache_counts_and_is_dropped_for_room():
    cache = [70]
    ledger = Ledger(100, cache_bytes=lambda: cache[0], drop_cache=lambda: cache.__setitem__(0, 0))
    assert ledger.available() == 30
    assert ledger.reserve("weights:a", 90)
    assert cache == [0]
    assert ledger.available() == 10


def kept_in_cache(nbytes: int) -> tuple[Ledger, list[int]]:
    cache = [nbytes]
    drop = partial(cache.__setitem__, 0, 0)
    return Ledger(100, cache_bytes=lambda: cache[0], drop_cache=drop), cache


def test_what_steps_work_on_is_not_counted_again_in_the_buffer_cache():
    ledger, cache = kept_in_cache(30)
    assert ledger.reserve("working:a", 25)
    assert ledger.available() == 70
    assert ledger.figures()["buffer_cache"] == 5
    assert ledger.reserve("pages:a", 70)
    assert cache == [30]


def test_buffer_cache_is_kept_where_dropping_it_would_not_make_room():
    ledger, cache = kept_in_cache(30)
    assert ledger.reserve("weights:a", 50)
    assert not ledger.spare(51)
    assert cache == [30]
    assert ledger.spare(50)
    assert cache == [0]


def test_only_a_buffer_cache_larger_than_steps_need_is_trimmed():
    ledger, cache = kept_in_cache(30)
    assert ledger.reserve("working:a", 30)
    ledger.trim()
    assert cache == [30]
    ledger.release("working:a", 1)
    ledger.trim()
    assert cache == [0]


def test_measured_figures_replace_the_promise_even_when_they_overdraw():
    ledger = empty_cache_ledger(100)
    ledger.reserve("weights:a", 10)
    ledger.record("weights:a", 120)
    assert ledger.available() == -20
    ledger.record("weights:a", 0)
    assert "weights:a" not in ledger.figures()


def test_giving_back_more_than_was_promised_is_an_error():
    ledger = empty_cache_ledger(100)
    ledger.reserve("pages:a", 5)
    with pytest.raises(ValueError, match="pages:a gives back 6 bytes of 5"):
        ledger.release("pages:a", 6)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-40, 60))))
def test_lines_never_exceed_the_limit(steps: list[tuple[str, int]]):
    ledger = empty_cache_ledger(100)
    held: dict[str, int] = dict.fromkeys("abc", 0)
    for line, nbytes in steps:
        if nbytes > 0:
            fits = sum(held.values()) + nbytes <= 100
            assert ledger.reserve(line, nbytes) == fits
            held[line] += nbytes if fits else 0
        elif held[line] >= -nbytes > 0:
            ledger.release(line, -nbytes)
            held[line] += nbytes
        assert ledger.available() == 100 - sum(held.values()) >= 0
