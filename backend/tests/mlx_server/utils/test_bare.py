from __future__ import annotations

import pytest

from mlx_manager.mlx_server.utils.bare import BareErrors


def test_an_error_without_a_class_of_its_own_gets_one() -> None:
    with (
        pytest.raises(ValueError, match="not read: newer than this") as caught,
        BareErrors("not read"),
    ):
        raise Exception("newer than this")
    assert type(caught.value.__cause__) is Exception


@pytest.mark.parametrize("kind", [ValueError, KeyError, KeyboardInterrupt])
def test_other_errors_stay_what_they_are(kind: type[BaseException]) -> None:
    error = kind("as it is")
    with pytest.raises(kind) as caught, BareErrors("not read"):
        raise error
    assert caught.value is error


def test_what_goes_well_is_left_alone() -> None:
    @BareErrors("not read")
    def read() -> int:
        return 7

    assert read() == 7
