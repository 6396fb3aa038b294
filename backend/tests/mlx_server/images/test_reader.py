from __future__ import annotations

import asyncio
import hashlib
import pickle
import subprocess
import sys
import time

import pytest
from pictures import data_url, in_base64, picture

from mlx_manager.mlx_server.config import ImageLimits
from mlx_manager.mlx_server.core import Image
from mlx_manager.mlx_server.errors import InvalidParameter, InvalidRequest, UnsupportedParameter
from mlx_manager.mlx_server.images.reader import ImageReader
from mlx_manager.mlx_server.images.sources import base64_source, url_source

RED, BLUE = picture(), picture("JPEG", (5, 9), (0, 0, 255))


async def test_pictures_come_in_their_order_with_their_places():
    reader = ImageReader(ImageLimits())
    found = await reader.read(
        [
            url_source(data_url(RED), "a"),
            base64_source(in_base64(BLUE), "image/jpeg", "b"),
            base64_source(in_base64(RED), None, "c"),
        ]
    )
    assert [(image.data, image.param, image.width, image.height) for image in found] == [
        (RED, "a", 12, 8),
        (BLUE, "b", 5, 9),
        (RED, "c", 12, 8),
    ]
    assert found[0].digest == hashlib.sha256(RED).hexdigest()
    assert found[0] == found[2]


async def test_equal_bytes_are_decoded_once():
    reader = ImageReader(ImageLimits())
    for _ in range(3):
        await reader.read([url_source(data_url(RED), f"at {i}") for i in range(5)])
    assert reader.decodings == 1
    await reader.read([url_source(data_url(BLUE, "image/jpeg"), "")])
    assert reader.decodings == 2


async def test_equal_bytes_that_are_declared_otherwise_are_still_refused():
    reader = ImageReader(ImageLimits())
    await reader.read([url_source(data_url(RED), "a")])
    with pytest.raises(InvalidParameter, match="its bytes are a PNG"):
        await reader.read([url_source(data_url(RED, "image/gif"), "b")])


@pytest.mark.parametrize("places", [("a", "b"), ("b", "a")])
async def test_the_first_broken_picture_is_named(places: tuple[str, str]):
    broken = data_url(picture(size=(300, 200))[:400])
    sound = url_source(data_url(RED), "sound")
    reader = ImageReader(ImageLimits())
    with pytest.raises(InvalidParameter, match="broken PNG") as got:
        await reader.read([sound, *(url_source(broken, place) for place in places)])
    assert got.value.param == places[0]


async def test_each_of_two_requests_with_one_broken_picture_is_told_its_own_place():
    broken = data_url(picture(size=(300, 200))[:400])
    reader = ImageReader(ImageLimits())
    asked = [reader.read([url_source(broken, place)]) for place in ("a", "b", "c")]
    ends = await asyncio.gather(*asked, return_exceptions=True)
    assert [end.param for end in ends if isinstance(end, InvalidRequest)] == ["a", "b", "c"]


async def test_a_caller_who_leaves_takes_nothing_from_another():
    reader = ImageReader(ImageLimits())
    large = url_source(data_url(picture(size=(1500, 1500))), "a")
    leaves = asyncio.create_task(reader.read([large]))
    stays = asyncio.create_task(reader.read([large]))
    await asyncio.sleep(0)
    leaves.cancel()
    assert (await stays)[0].width == 1500


async def test_decoding_does_not_hold_the_event_loop():
    reader = ImageReader(ImageLimits())
    large = url_source(data_url(picture(size=(3000, 3000))), "a")
    reading = asyncio.create_task(reader.read([large]))
    turns = 0
    begun = time.perf_counter()
    while not reading.done() and time.perf_counter() - begun < 60:
        await asyncio.sleep(0)
        turns += 1
    assert (await reading)[0].width == 3000
    assert turns > 100


async def test_without_the_owners_leave_no_host_is_asked():
    with pytest.raises(UnsupportedParameter, match="MLX_SERVER_IMAGE_HOSTS") as got:
        await ImageReader(ImageLimits()).read([url_source("https://example.com/a.png", "here")])
    assert got.value.param == "here"


def test_a_picture_shows_no_data_and_crosses_to_a_worker_whole():
    image = Image(RED, "d" * 64, 12, 8, "place")
    assert repr(RED[:20])[2:-1] not in repr(image)
    crossed = pickle.loads(pickle.dumps(image))
    assert (crossed, crossed.data, crossed.param) == (image, RED, "place")


WITHOUT = """
import asyncio, base64, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "PIL":
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from mlx_manager.mlx_server.config import ImageLimits
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.images.reader import ImageReader
from mlx_manager.mlx_server.images.sources import url_source
async def main():
    try:
        await ImageReader(ImageLimits()).read([url_source(sys.argv[1], "here")])
    except MLXManagerError as error:
        print(error.status, error.param, error.message)
asyncio.run(main())
"""


def test_without_pillow_the_error_says_what_to_install():
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT, data_url(RED)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.startswith("400 here ")
    assert "pip install 'mlx-manager-server[vision]'" in ran.stdout
