"""How the driver is called, with the C library in its place: it is there without a GPU."""

from __future__ import annotations

import ctypes

import pytest

from mlx_manager.mlx_server.devices.cuda import driver
from mlx_manager.mlx_server.devices.cuda.driver import Driver


def test_an_answer_other_than_0_is_an_error(monkeypatch):
    monkeypatch.setattr(driver, "LIBRARY", None)
    functions = Driver()
    functions.call("abs", ctypes.c_int(0))
    with pytest.raises(RuntimeError, match="answers 5 to abs"):
        functions.call("abs", ctypes.c_int(-5))


def test_a_function_that_it_lacks_is_named(monkeypatch):
    monkeypatch.setattr(driver, "LIBRARY", None)
    with pytest.raises(AttributeError, match="cuNothing"):
        Driver().call("cuNothing")


def test_a_machine_without_one_is_told_apart(monkeypatch):
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-is-not-here.so.1")
    with pytest.raises(OSError, match="libcuda-is-not-here"):
        Driver()


def test_an_attribute_is_asked_of_the_first_gpu(monkeypatch):
    monkeypatch.setattr(driver, "LIBRARY", None)
    asked = []

    def call(self: Driver, name: str, *arguments: object) -> None:
        asked.append(name)
        if name == "cuDeviceGetAttribute":
            value, number, device = arguments
            value._obj.value = 10 * number.value + device.value  # type: ignore[attr-defined]

    monkeypatch.setattr(Driver, "call", call)
    assert Driver().attribute(18) == 180
    assert asked == ["cuInit", "cuDeviceGetAttribute"]
