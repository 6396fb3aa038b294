from __future__ import annotations

import pytest

from mlx_manager.mlx_server.address import as_browsers_say, is_loopback, url_of


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback_is_this_machine_alone(host: str):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "myhost", ""])
def test_others_reach_every_other_address(host: str):
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("myhost", "http://myhost:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("[::1]", "http://[::1]:8000"),
        ("fd00::5", "http://[fd00::5]:8000"),
    ],
)
def test_a_server_is_found_where_it_listens(host: str, url: str):
    assert url_of(host, 8000) == url


@pytest.mark.parametrize("address", ["192.168.1.5", "fd00::5", "[fd00::5]"])
def test_an_address_is_said_as_it_is(address: str):
    assert as_browsers_say(address) == address.strip("[]")
