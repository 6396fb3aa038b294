"""Draws scenes with Pillow: any size of canvas, several fonts, noise, blur, JPEG's artefacts."""

from __future__ import annotations

import importlib.util
import io
import math
import random
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from training.vision.scenes import Scene, Thing, contrast

SIDE = 256  # what the tower sees
Colour = tuple[int, int, int]
Font = ImageFont.FreeTypeFont
Point = tuple[float, float]

_FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
)


@lru_cache(maxsize=1)
def font_files() -> tuple[Path | None, ...]:
    """Pillow's own font (None), and DejaVu's where matplotlib or Debian has installed them."""
    folders = [Path("/usr/share/fonts/truetype/dejavu")]
    if spec := importlib.util.find_spec("matplotlib"):
        folders.insert(0, Path(str(spec.origin)).parent / "mpl-data" / "fonts" / "ttf")
    for folder in folders:
        found = [folder / f"{name}.ttf" for name in _FONTS if (folder / f"{name}.ttf").is_file()]
        if found:
            return (None, None, None, *found)
    return (None,)


@lru_cache(maxsize=512)
def _font(file: Path | None, size: int) -> Font:
    if file is None:
        font = ImageFont.load_default(size)
        if not isinstance(font, ImageFont.FreeTypeFont):
            raise RuntimeError("Pillow was built without FreeType: it has no scalable font")
        return font
    return ImageFont.truetype(str(file), size)


def corners(name: str) -> list[Point]:
    """A shape's outline in a box from -1 to 1; empty for what is drawn as an ellipse."""
    match name:
        case "square" | "rectangle":
            return [(-1, -1), (1, -1), (1, 1), (-1, 1)]
        case "triangle":
            return [(0, -1), (1, 1), (-1, 1)]
        case "star":
            radii = (1.0, 0.42) * 5
            return [
                (r * math.sin(k * math.pi / 5), -r * math.cos(k * math.pi / 5))
                for k, r in enumerate(radii)
            ]
        case "cross":
            a = 0.36
            return [
                (-a, -1), (a, -1), (a, -a), (1, -a), (1, a), (a, a),
                (a, 1), (-a, 1), (-a, a), (-1, a), (-1, -a), (-a, -a),
            ]  # fmt: skip
        case "heart":
            turns = [k * 2 * math.pi / 40 for k in range(40)]
            return [(math.sin(t) ** 3, -_heart(t)) for t in turns]
    return []


def _heart(t: float) -> float:
    y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
    return (y + 2.5) / 15


class Drawing:
    """A canvas of width x height pixels being drawn on."""

    def __init__(self, rng: random.Random, scene: Scene, width: int, height: int) -> None:
        self.rng = rng
        self.scene = scene
        self.size = (width, height)
        self.unit = min(width, height)
        self.image = Image.new("RGB", self.size, scene.background_rgb)
        self.pen = ImageDraw.Draw(self.image)
        self.font_file = rng.choice(font_files())

    def draw(self) -> Image.Image:
        """Draw all things, those that lie around others first."""
        for thing in reversed(self.scene.things):
            if thing.kind == "shape":
                self.shape(thing)
            else:
                self.text(thing)
        return self.image

    def centre(self, thing: Thing) -> Point:
        return thing.x * self.size[0], thing.y * self.size[1]

    def box(self, thing: Thing) -> tuple[float, float, float, float]:
        x, y = self.centre(thing)
        w, h = thing.w * self.unit / 2, thing.h * self.unit / 2
        return x - w, y - h, x + w, y + h

    def shape(self, thing: Thing) -> None:
        line = max(2, round(self.unit * min(thing.w, thing.h) * self.rng.uniform(0.06, 0.12)))
        fill, outline = (None, thing.rgb) if thing.outline else (thing.rgb, None)
        if not (points := corners(thing.name)):
            self.pen.ellipse(self.box(thing), fill, outline, line if thing.outline else 0)
            return
        x, y = self.centre(thing)
        w, h = thing.w * self.unit / 2, thing.h * self.unit / 2
        cos, sin = math.cos(math.radians(thing.angle)), math.sin(math.radians(thing.angle))
        placed = [(x + p * w * cos - q * h * sin, y + p * w * sin + q * h * cos) for p, q in points]
        if thing.outline:
            self.pen.line([*placed, *placed[:2]], thing.rgb, line, "curve")
        else:
            self.pen.polygon(placed, fill)

    def text(self, thing: Thing) -> None:
        room_w, room_h = thing.w * self.unit, thing.h * self.unit
        if thing.frame:
            self.frame(thing)
            room_w /= 1.35
            room_h /= 1.9 if thing.frame == "box" else 2.8
        font, stroke = self.fitted(thing.name, room_w, room_h)
        x, y = self.centre(thing)
        if thing.frame == "window":
            y += 0.09 * thing.h * self.unit
        if not thing.angle:
            self.pen.text((x, y), thing.name, thing.rgb, font, "mm", stroke_width=stroke)
            return
        size = (round(room_w * 1.3) + 8, round(room_w * 0.35 + room_h * 1.6) + 8)
        mask = Image.new("L", size)
        middle = (size[0] / 2, size[1] / 2)
        ImageDraw.Draw(mask).text(middle, thing.name, 255, font, "mm", stroke_width=stroke)
        mask = mask.rotate(thing.angle, Image.Resampling.BILINEAR)
        self.image.paste(thing.rgb, (round(x - middle[0]), round(y - middle[1])), mask)

    def fitted(self, text: str, width: float, height: float) -> tuple[Font, int]:
        """Return the largest font in which a text fits, and a stroke that makes it bold or not."""
        left, top, right, bottom = _font(self.font_file, 64).getbbox(text, anchor="mm")
        scale = min(width / (right - left), height / max(bottom - top, 44))
        size = max(8, min(600, int(64 * scale)))
        bold = self.rng.random() < 0.3
        return _font(self.font_file, size), round(size * 0.03) if bold else 0

    def frame(self, thing: Thing) -> None:
        """Draw a box, or a window with a bar, that a word stands in."""
        rng, ground = self.rng, self.scene.background_rgb
        while True:
            light = rng.random() < 0.6
            fill: Colour = _any(rng, 225, 255) if light else _any(rng, 0, 255)
            if contrast(fill, thing.rgb) > 120:
                break
        edge = _any(rng, 90, 190) if contrast(fill, ground) < 60 or rng.random() < 0.5 else fill
        line = max(1, self.unit // rng.choice((100, 200, 300)))
        x0, y0, x1, y1 = self.box(thing)
        radius = (y1 - y0) * rng.choice((0, 0, 0.08, 0.2)) if thing.frame == "box" else 0
        self.pen.rounded_rectangle((x0, y0, x1, y1), radius, fill, edge, line)
        if thing.frame == "window":
            bar = y0 + (y1 - y0) * 0.2
            tone = rng.choice((_any(rng, 60, 120), _any(rng, 180, 215), (50, 90, 160)))
            self.pen.rectangle((x0, y0, x1, bar), tone)
            dot = (bar - y0) * 0.25
            start = rng.choice((x0 + 3 * dot, x1 - 9 * dot))
            for k, colour in enumerate(((240, 90, 80), (240, 190, 60), (90, 200, 90))):
                x = start + k * 3 * dot
                y = (y0 + bar) / 2
                self.pen.ellipse((x - dot, y - dot, x + dot, y + dot), colour)


def _any(rng: random.Random, low: int, high: int) -> Colour:
    return rng.randint(low, high), rng.randint(low, high), rng.randint(low, high)


def _canvas(rng: random.Random, scene: Scene) -> tuple[int, int]:
    side = rng.choices((256, 320, 400, 512, 640, 1024), (16, 4, 4, 3, 1, 0.3))[0]
    if rng.random() < 0.65:
        return side, side
    texts_only = all(thing.kind != "shape" for thing in scene.things)
    ratio = rng.uniform(1, 1.8 if texts_only else 1.34)
    return (round(side * ratio), side) if rng.random() < 0.7 else (side, round(side * ratio))


def picture(rng: random.Random, scene: Scene) -> Image.Image:
    """Draw a scene on a canvas of any size."""
    return Drawing(rng, scene, *_canvas(rng, scene)).draw()


def seen(image: Image.Image) -> Image.Image:
    """Resize a picture to what the tower sees, as Idefics3's processor does without tiles."""
    if image.size == (SIDE, SIDE):
        return image
    return image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def _worn(rng: random.Random, image: Image.Image) -> Image.Image:
    """Turn, blur and compress a small picture, each now and then."""
    if rng.random() < 0.1:
        ground = image.getpixel((1, 1))
        angle = rng.uniform(-4, 4)
        image = image.rotate(angle, Image.Resampling.BILINEAR, fillcolor=ground)  # type: ignore[arg-type]
    if rng.random() < 0.15:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.9)))
    if rng.random() < 0.25:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=rng.randint(40, 92))
        image = Image.open(file)
    return image


def pixels(rng: random.Random, scene: Scene) -> NDArray[np.uint8]:
    """Draw a scene as the tower sees it in training: (256, 256, 3), with noise now and then."""
    image = np.asarray(_worn(rng, seen(picture(rng, scene))))
    if rng.random() < 0.3:
        noise = np.frombuffer(rng.randbytes(image.size), np.int8).reshape(image.shape)
        image = np.clip(image.astype(np.int16) + (noise >> rng.choice((3, 4, 4, 5))), 0, 255)
    return image.astype(np.uint8)
