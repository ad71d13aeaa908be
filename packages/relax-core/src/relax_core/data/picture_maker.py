"""`PictureMaker`: a picture, checked, decoded and processed into a file; and what such a file holds."""

import hashlib
import io
import json
import logging
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from relax_rollout.pictures import Grid, Picture

from relax_core.data.config import DataConfig
from relax_core.data.problems import DataError, RowError

_log = logging.getLogger(__name__)

# Goes up when a picture is processed in another way, so that what earlier versions kept is not taken.
_FORM = b"2"

_ORIENTATION = 0x0112
"""EXIF's tag."""

# Pillow's conversion to 8 bits cuts the pixels of these modes off instead of scaling them.
_WIDE_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")

DAMAGE = (zipfile.BadZipFile, OSError, ValueError, KeyError, EOFError, NotImplementedError)
"""What numpy and zipfile raise for a file that was cut, overwritten, or holds something else."""


class PictureMaker:
    """Makes files of processed pictures; small, and fit for pickle.

    Args:
        processor: transformers' image processor.
        cfg: limits, and where paths start from if not from the folder of their rows.
    """

    def __init__(self, processor: Any, cfg: DataConfig) -> None:
        self._processor = processor
        self._max_bytes = int(cfg.image_max_mib * 2**20)
        self._max_pixels = cfg.image_max_pixels
        self._root = cfg.images_root
        settings = json.dumps(processor.to_dict(), sort_keys=True, default=str)
        self._settings = hashlib.sha256(_FORM + settings.encode()).digest()

    def key(self, data: bytes) -> str:
        """Digest of a picture's bytes and of the processor's settings."""
        return hashlib.sha256(self._settings + data).hexdigest()

    def bytes_of(self, value: Any, name: str, folder: Path | None) -> tuple[bytes, str]:
        """A picture's bytes, and its name for texts.

        Args:
            value: a path, bytes, or {bytes, path}.
            name: for texts, where the value has none.
            folder: of the row's file; None is the working directory.

        Raises:
            RowError: it cannot be read, or is too large.
        """
        if isinstance(value, dict):
            name = str(value.get("path") or name)
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            if len(value) > self._max_bytes:
                raise RowError(self._too_large(name, len(value)))
            return value, name
        if not isinstance(value, str) or not value:
            raise RowError(f"{name} must be a path or bytes of a picture, not {type(value).__name__}")
        if "://" in value and not value.startswith("file://"):
            raise RowError(f"{name} is {value[:60]!r}: nothing is downloaded; give a path or bytes")
        root = (self._root or folder or Path()).expanduser()
        file = root.absolute() / value.removeprefix("file://")
        try:
            size = file.stat().st_size
            if size > self._max_bytes:
                raise RowError(self._too_large(str(file), size))
            return file.read_bytes(), str(file)
        except OSError as error:
            raise RowError(f"picture {file} cannot be read: {error.strerror or error}") from error

    def _too_large(self, name: str, size: int) -> str:
        return (
            f"picture {name} has {size} bytes, above data.image_max_mib = {self._max_bytes / 2**20:g} MiB: "
            "shrink it, or raise the limit"
        )

    def make(self, data: bytes, name: str, file: Path) -> tuple[Grid, int]:
        """Writes the processed picture into `file`; its grid and merge, see `Picture`.

        Raises:
            RowError: it is no still picture of 8 bits a channel, damaged, or too large.
        """
        image = self._decoded(data, name)
        try:
            made = self._processor(images=[image], return_tensors="np")
        # It refuses extreme shapes.
        except ValueError as error:
            raise RowError(f"picture {name} ({len(data)} bytes) is unfit: {error}") from error
        frames, rows, columns = (int(side) for side in made["image_grid_thw"][0])
        merge = int(self._processor.merge_size)
        picture = Picture.of(
            np.asarray(made["pixel_values"], np.float32),
            (frames, rows, columns),
            merge=merge,
            channels=3,
            frames=int(self._processor.temporal_patch_size),
        )
        _write(file, picture)
        return picture.grid, merge

    def _decoded(self, data: bytes, name: str) -> Any:
        from PIL import Image, UnidentifiedImageError

        what = f"picture {name} ({len(data)} bytes)"
        try:
            with Image.open(io.BytesIO(data)) as opened:
                self._check(opened, name)
                return _turned(opened.convert("RGB"), opened.getexif().get(_ORIENTATION))
        except UnidentifiedImageError as error:
            raise RowError(f"{what} is of no known format") from error
        except Image.DecompressionBombError as error:
            raise RowError(f"{what} is too large to decode: {error}") from error
        except (RowError, MemoryError):
            raise
        # A decoder raises whatever it comes to in damaged bytes: RuntimeError, TypeError, struct.error, ...
        except Exception as error:
            raise RowError(f"{what} is damaged: {error}") from error

    def _check(self, image: Any, name: str) -> None:
        width, height = image.size
        if width * height > self._max_pixels:
            raise RowError(
                f"picture {name} has {width} x {height} pixels, above data.image_max_pixels = "
                f"{self._max_pixels}: shrink it, or raise the limit"
            )
        count = getattr(image, "n_frames", 1)
        # Cameras put a preview behind the picture (MPO).
        if count > 1 and image.format != "MPO":
            raise RowError(f"picture {name} has {count} frames: give one still picture in its place")
        if image.mode in _WIDE_MODES:
            raise RowError(f"picture {name} has pixels of mode {image.mode}: store it with 8 bits a channel")

    def make_again(self, source: str, key: str, file: Path) -> None:
        """Writes a damaged `file` anew from its source.

        Raises:
            RowError: the source is not there any more, or is another picture now.
        """
        cure = "remove the file and start the run anew (--resume goes on)"
        try:
            data, name = self.bytes_of(source, source, None)
        except RowError as error:
            raise RowError(
                f"kept picture {file} is damaged, and its source cannot be read again: {error}; {cure}"
            ) from error
        if self.key(data) != key:
            raise RowError(f"kept picture {file} is damaged, and its source {name} has changed since: {cure}")
        self.make(data, name, file)


def _turned(image: Any, orientation: Any) -> Any:
    """As it was seen: cameras write down how they were held instead of turning the pixels.

    Pillow's `exif_transpose` does the same and writes all other EXIF data anew, which fails where one is odd.
    """
    from PIL.Image import Transpose

    turns = (
        Transpose.FLIP_LEFT_RIGHT,
        Transpose.ROTATE_180,
        Transpose.FLIP_TOP_BOTTOM,
        Transpose.TRANSPOSE,
        Transpose.ROTATE_270,
        Transpose.TRANSVERSE,
        Transpose.ROTATE_90,
    )
    turn = dict(enumerate(turns, start=2)).get(orientation)
    return image if turn is None else image.transpose(turn)


def read_kept(file: Path) -> Picture:
    """The picture that `PictureMaker.make` wrote.

    Raises:
        OSError, ValueError, ...: see `DAMAGE`.
    """
    with np.load(file) as kept:
        frames, rows, columns, merge = (int(side) for side in kept["grid"])
        grid = (frames, rows, columns)
        return Picture(grid, merge, kept["codes"], kept["values_CV"], int(kept["frames"]))


def find_kept(file: Path) -> tuple[Grid, int] | None:
    """Grid and merge of what an earlier run kept there; None where nothing can be read."""
    if not file.is_file():
        return None
    try:
        with np.load(file) as kept:
            frames, rows, columns, merge = (int(side) for side in kept["grid"])
        return (frames, rows, columns), merge
    except DAMAGE as error:
        warn_of_damage(file, error)
        return None


def warn_of_damage(file: Path, error: Exception) -> None:
    """One line in the log."""
    _log.warning("kept picture %s is damaged (%s) and is made again", file, error)


def _write(file: Path, picture: Picture) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as part:
            unfinished = Path(part.name)
            try:
                np.savez(
                    part,
                    codes=picture.codes,
                    values_CV=picture.values_CV,
                    frames=picture.frames,
                    grid=np.asarray([*picture.grid, picture.merge]),
                )
                part.flush()
                unfinished.replace(file)
            finally:
                unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"processed pictures cannot be kept in {file.parent}: {error.strerror or error}. Set "
            "data.image_cache to a folder with more room"
        ) from error
