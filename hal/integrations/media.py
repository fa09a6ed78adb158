"""Pictures and videos to files.  A file is written beside its place and moved there whole, or not at all."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import AttachError
from ..files import beside, replacing

SUFFIXES = (".png", ".gif", ".mp4")


def writable(out: str | os.PathLike[str]) -> Path:
    """``out`` as a path that :func:`save` can write, checked before anything expensive runs.  Raises AttachError."""
    path = Path(out)
    try:
        _check(path)
    except (OSError, ValueError) as e:  # a name too long, a file system that takes no files, a null byte
        raise AttachError(f"cannot write {str(path)!r}: {e}") from e
    return path


def _check(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise AttachError(f"cannot write {str(path)!r}: a file ends in one of {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise AttachError(f"cannot write {str(path)!r}: it is a folder; name a file")
    if not path.parent.is_dir():
        raise AttachError(f"cannot write {str(path)!r}: the folder {str(path.parent)!r} does not exist; create it")
    if not os.access(path.parent, os.W_OK):
        raise AttachError(f"cannot write {str(path)!r}: no permission to write in {str(path.parent)!r}")
    if find_spec("PIL") is None:
        raise AttachError("pictures are written by Pillow, which is not installed; pip install pillow")
    if path.suffix.lower() == ".mp4" and find_spec("imageio_ffmpeg") is None:
        raise AttachError(
            "MP4 is written by imageio-ffmpeg, which is not installed; "
            "pip install imageio-ffmpeg, or name a .gif or .png file"
        )
    with suppress(FileNotFoundError):
        path.stat()
    part = beside(path)
    part.touch()
    part.unlink()


def free(path: Path, force: bool, fix: str) -> None:
    """Raises AttachError, which tells the ``fix``, for a file that is there already, unless it may be replaced."""
    if path.exists() and not force:
        raise AttachError(f"cannot write {str(path)!r}: there is such a file; {fix} replaces it")


def numbered(path: Path, seeds: Sequence[int]) -> list[Path]:
    """``path`` for one seed; for several, one name for each, with the seed at its end: cat-0.gif, cat-1.gif, …"""
    return [path] if len(seeds) == 1 else [path.with_stem(f"{path.stem}-{seed}") for seed in seeds]


def generated(prompt: str, seed: int, suffix: str) -> Path:
    """A name in the folder ``outputs`` here, from the prompt and the seed; :func:`save` makes it new.  Raises AttachError."""
    folder = Path("outputs")
    above = folder if folder.exists() else Path()
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise AttachError(f"cannot write in the folder {str(folder)!r} of {str(Path.cwd())!r}; name a file with --out")
    words = re.sub(r"\W+", "-", prompt.lower()).strip("-_")[:48].rstrip("-_") or "output"
    path = folder / f"{words}-{seed}.{suffix}"
    writable(above / path.name)
    return path


def save(frames: Sequence[Any], path: Path, fps: int = 16, new: bool = False) -> Path:
    """Write Pillow images of one size: PNG (several images make a contact sheet), GIF or MP4, by ``path``'s suffix.

    ``new``: the folder is made, and a name that is taken gets a number.  Returns where it was written.
    """
    try:
        path = _taken(path) if new else path
        try:
            _save(frames, path, fps)
        except BaseException:
            if new:
                path.unlink(missing_ok=True)
            raise
    except OSError as e:
        raise AttachError(f"cannot write {str(path)!r}: {e}") from e
    return path


def _taken(path: Path) -> Path:
    """The first free one of name.png, name-2.png, …, made as an empty file so that nobody else takes it."""
    path.parent.mkdir(exist_ok=True)
    for name in itertools.chain([path], (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(2))):
        try:
            name.touch(exist_ok=False)
        except FileExistsError:
            continue
        return name
    raise AssertionError


def _save(frames: Sequence[Any], path: Path, fps: int) -> None:
    suffix = path.suffix.lower()
    images = [image.convert("RGB") for image in frames]
    with replacing(path) as part:
        if suffix == ".png":
            sheet(images).save(part, "PNG")
        elif suffix == ".gif":
            images[0].save(part, "GIF", save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0)
        else:
            _mp4(images, part, fps)


def sheet(images: Sequence[Any], gap: int = 2) -> Any:
    """The images side by side in rows, as square as they go; a single image is itself."""
    from PIL import Image

    if len(images) == 1:
        return images[0]
    width, height = images[0].size
    columns = math.ceil(math.sqrt(len(images) * height / width))
    rows = math.ceil(len(images) / columns)
    whole = Image.new("RGB", (columns * (width + gap) - gap, rows * (height + gap) - gap), "white")
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        whole.paste(image, (column * (width + gap), row * (height + gap)))
    return whole


def _mp4(images: Sequence[Any], path: Path, fps: int) -> None:
    import imageio_ffmpeg

    # Players want even sides (4:2:0 chroma): cut the odd last row or column.
    width, height = (side - side % 2 for side in images[0].size)
    if not width or not height:
        raise AttachError(f"cannot write {str(path)!r}: an MP4 frame needs at least 2 x 2 pixels")
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", "-f", "rawvideo", "-pix_fmt", "rgb24"]
    command += ["-s", f"{width}x{height}", "-r", str(fps), "-i", "-"]
    command += ["-vcodec", "libx264", "-pix_fmt", "yuv420p", "-crf", "10", str(path)]
    # Not by imageio_ffmpeg.write_frames: it does not tell when ffmpeg fails at the end, on a full disk for one.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as ffmpeg:
        assert ffmpeg.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and says why
            for image in images:
                ffmpeg.stdin.write(image.crop((0, 0, width, height)).tobytes())
        _, said = ffmpeg.communicate()
    if ffmpeg.returncode:
        lines = said.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise OSError(f"ffmpeg: {lines[-1]}")
