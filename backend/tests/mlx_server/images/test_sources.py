from __future__ import annotations

import base64
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pictures import data_url, in_base64, picture

from mlx_manager.mlx_server.errors import (
    InvalidParameter,
    InvalidRequest,
    RequestTooLarge,
    UnsupportedParameter,
)
from mlx_manager.mlx_server.images.sources import PIECE, base64_source, decoded, url_source

PLACE = "messages[2].content[1].image_url.url"
DATA = picture()
MOST = 10**6


@pytest.mark.parametrize(
    "url",
    [
        data_url(DATA),
        f"DATA:image/png;BASE64,{in_base64(DATA)}",
        f"data:image/png;charset=utf-8;base64,{in_base64(DATA)}",
        f"data:image/png;base64,{in_base64(DATA).rstrip('=')}",
        f"data:image/png;base64,{base64.urlsafe_b64encode(DATA).decode()}",
        f"data:image/png;base64,{base64.encodebytes(DATA).decode()}",
        data_url(DATA).replace("=", "%3D").replace("+", "%2B"),
        "data:image/png," + "".join(f"%{byte:02x}" for byte in DATA),
    ],
)
def test_data_urls_are_read_as_clients_write_them(url: str):
    assert decoded(url_source(url, PLACE), MOST) == (DATA, "image/png")


def test_base64_is_read_with_and_without_a_data_urls_head():
    assert decoded(base64_source(in_base64(DATA), None, PLACE), MOST) == (DATA, None)
    assert decoded(base64_source(data_url(DATA), None, PLACE), MOST) == (DATA, "image/png")
    assert decoded(base64_source(in_base64(DATA), "image/gif", PLACE), MOST) == (DATA, "image/gif")


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://host/a.png", "/a.png", "", "a.png", "blob:x", "attachment"]
)
def test_other_schemes_are_refused_with_their_place(url: str):
    with pytest.raises(UnsupportedParameter, match=re.escape(PLACE)) as got:
        url_source(url, PLACE)
    assert got.value.param == PLACE


@given(st.integers(0, 9), st.booleans())
def test_base64_in_pieces_is_the_whole(beyond: int, padded: bool):
    data = bytes(range(256)) * 6200 + bytes(beyond)
    text = in_base64(data)
    assert len(text) > 2 * PIECE
    source = base64_source(text if padded else text.rstrip("="), None, PLACE)
    assert decoded(source, 2 * len(data))[0] == data
    with pytest.raises(InvalidParameter, match="not valid base64"):
        decoded(base64_source(f"{text[: PIECE - 2]}=={text[PIECE:]}", None, PLACE), 2 * len(data))


@pytest.mark.parametrize(
    "url", ["data:", "data:image/png", "data:image/png;base64,A", "data:image/png;base64,é?*"]
)
def test_what_is_no_data_is_refused(url: str):
    with pytest.raises(InvalidParameter) as got:
        decoded(url_source(url, PLACE), MOST)
    assert got.value.param == PLACE


@pytest.mark.parametrize("url", ["data:image/png;base64,", "data:image/png,"])
def test_an_empty_picture_is_refused(url: str):
    with pytest.raises(InvalidParameter, match="is empty"):
        decoded(url_source(url, PLACE), MOST)


@pytest.mark.parametrize("size", [101, 10_000])
def test_too_many_bytes_are_refused(size: int):
    for source in (url_source(data_url(bytes(size)), PLACE), url_source(f"data:,{'a' * size}", "")):
        with pytest.raises(RequestTooLarge, match="MLX_SERVER_MAX_IMAGE_MB"):
            decoded(source, 100)
    assert decoded(url_source(data_url(bytes(100)), PLACE), 100)[0] == bytes(100)


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused_with_its_place(text: str):
    for source in (base64_source(text, None, PLACE), base64_source(f"data:{text}", None, PLACE)):
        refused: InvalidRequest | None = None
        try:
            decoded(source, MOST)
        except InvalidRequest as error:
            refused = error
        assert refused is None or refused.param == PLACE


def test_a_source_shows_no_data():
    assert in_base64(DATA)[:40] not in repr(url_source(data_url(DATA), PLACE))
