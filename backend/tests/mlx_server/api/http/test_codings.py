from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib

import brotli
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_manager.mlx_server.api.http.codings import decoded
from mlx_manager.mlx_server.errors import InvalidRequest, RequestTooLarge


def bare_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


CODERS = {
    "identity": bytes,
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZip": gzip.compress,
    "deflate": zlib.compress,
    " deflate ": bare_deflate,
    "br": brotli.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}
CODINGS = sorted(set(CODERS) - {"identity", "x-gzip", "GZip", " deflate "})


@pytest.mark.parametrize("coding", CODERS)
@settings(max_examples=20, deadline=None)
@given(data=st.binary(max_size=2000), times=st.sampled_from([1, 1000]))
def test_what_was_compressed_comes_back(coding: str, data: bytes, times: int):
    packed = CODERS[coding](data * times)
    assert asyncio.run(decoded(packed, coding, 2**22)) == data * times


async def test_codings_are_undone_in_the_order_of_the_header():
    packed = zstandard.compress(gzip.compress(b"{}"))
    assert await decoded(packed, "gzip, zstd", 100) == b"{}"


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_several_members_are_one_body(coding: str):
    packed = CODERS[coding](b"[1") + CODERS[coding](b"]")
    assert await decoded(packed, coding, 100) == b"[1]"


@pytest.mark.parametrize("coding", CODINGS)
async def test_a_bomb_is_refused_before_it_is_inflated(coding: str):
    bomb = CODERS[coding](bytes(200 * 2**20))
    tracemalloc.start()
    try:
        with pytest.raises(RequestTooLarge, match="MLX_SERVER_MAX_BODY_MB"):
            await decoded(bomb, coding, 2**20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20


async def test_a_window_that_takes_much_memory_is_refused():
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = packer.compress(b"{}" * 2**20) + packer.flush()
    with pytest.raises(InvalidRequest, match="not valid zstd"):
        await decoded(packed, "zstd", 2**22)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("cut", [False, True], ids=["other", "cut"])
async def test_what_is_not_of_the_coding_is_refused(serve, coding: str, cut: bool):
    whole = b'{"messages": [{"role": "user", "content": "hi"}]}'
    broken = CODERS[coding](whole)[:-9] if cut else whole
    headers = {"content-type": "application/json", "content-encoding": coding}
    async with serve() as client:
        response = await client.post("/v1/chat/completions", content=broken, headers=headers)
    assert response.status_code == 400
    assert "not valid" in response.json()["error"]["message"]


@pytest.mark.parametrize("coding", ["compress", "snappy", "gzip, lzma", "br\x00"])
async def test_another_coding_is_refused_and_those_known_are_named(coding: str):
    with pytest.raises(InvalidRequest, match=r"br, deflate, gzip, zstd\."):
        await decoded(b"{}", coding, 100)


@pytest.mark.parametrize("coding", CODINGS)
async def test_a_compressed_request_is_answered(serve, coding: str):
    body = CODERS[coding](json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode())
    headers = {"content-type": "application/json", "content-encoding": coding}
    async with serve() as client:
        response = await client.post("/v1/chat/completions", content=body, headers=headers)
    assert response.json()["choices"][0]["message"]["content"] == "Hello"


async def test_a_bomb_over_http_is_413(serve):
    bomb = gzip.compress(b" " * 4 * 2**20 + b"{}")
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with serve(max_body_mb=1) as client:
        response = await client.post("/v1/chat/completions", content=bomb, headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
