"""Pictures of rows: found, checked, decoded and processed once, and kept in a folder until they are drawn."""

import hashlib
import io
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from relax_rollout.pictures import Grid, Picture

from relax_core.data.config import DataConfig
from relax_core.data.problems import DataError, RowError


@dataclass(frozen=True, slots=True)
class KeptPicture:
    """A processed picture in a folder.

    Attributes:
        key: digest of its bytes and of the processor's settings.
        file: where it lies.
        grid, merge: see `Picture`.
    """

    key: str
    file: Path
    grid: Grid
    merge: int

    @property
    def tokens(self) -> int:
        """Tokens that stand for the picture."""
        count, rows, columns = self.grid
        return count * rows * columns // self.merge**2

    def load(self) -> Picture:
        """The picture itself."""
        with np.load(self.file) as kept:
            return Picture(self.grid, self.merge, kept["codes"], kept["values_CV"], int(kept["frames"]))


@dataclass(frozen=True, slots=True)
class SamplePicture:
    """A picture of a sample and the place of its first token there."""

    kept: KeptPicture
    start: int


class PictureReader:
    """Reads pictures through the image processor of a model.

    Args:
        processor: transformers' image processor.
        token_id: of the token that stands for a piece of a picture.
        cfg: limits and folders.

    Attributes:
        token_id: the same.
    """

    def __init__(self, processor: Any, *, token_id: int, cfg: DataConfig) -> None:
        self.token_id = token_id
        self._processor = processor
        self._max_bytes = int(cfg.image_max_mib * 2**20)
        self._max_pixels = cfg.image_max_pixels
        given = Path(cfg.path).expanduser()
        self._root = cfg.images_root or (given if given.is_dir() else given.parent)
        # A folder of the reader's own ends with it: it must live as long as pictures are loaded.
        self._own = tempfile.TemporaryDirectory(prefix="relax-pictures-") if cfg.image_cache is None else None
        self._folder = Path(self._own.name) if self._own else Path(str(cfg.image_cache)).expanduser()
        self._folder.mkdir(parents=True, exist_ok=True)
        settings = json.dumps(processor.to_dict(), sort_keys=True, default=str)
        self._settings = hashlib.sha256(settings.encode()).digest()
        self._known: dict[str, KeptPicture] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For a worker process: the folder stays the reader's that made it."""
        return {**self.__dict__, "_own": None}

    @classmethod
    def open(cls, path: str | Path, config: Mapping[str, Any], cfg: DataConfig) -> "PictureReader":
        """The reader of a Hugging Face model folder; nothing is fetched and no code of it runs.

        Raises:
            DataError: the folder has no image processor, or the model takes no pictures.
        """
        # transformers' Auto class needs torchvision even for the processor that does without; one way on all
        # machines also gives all of them the same bits.
        from transformers import Qwen2VLImageProcessorPil

        token_id = config.get("image_token_id")
        if not isinstance(token_id, int):
            raise DataError(
                f"{path}: config.json has no image_token_id, so that the model takes no pictures: set "
                "data.images_key to null"
            )
        try:
            settings, _ = Qwen2VLImageProcessorPil.get_image_processor_dict(str(path), local_files_only=True)
            processor = Qwen2VLImageProcessorPil.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise DataError(
                f"no image processor can be read from {path}: {error}. It needs preprocessor_config.json, "
                "and pillow installed"
            ) from error
        kind = str(settings.get("image_processor_type", "Qwen2VLImageProcessor"))
        if not kind.startswith("Qwen2VLImageProcessor"):
            raise DataError(
                f"{path}: preprocessor_config.json is of a {kind}; only Qwen2VLImageProcessor is supported"
            )
        return cls(processor, token_id=token_id, cfg=cfg)

    def read(self, value: Any, name: str) -> KeptPicture:
        """The picture that a row gives: a path, bytes, or {bytes, path} as column stores have it.

        Raises:
            RowError: it cannot be read, is too large or is no picture; names it, with its size.
        """
        data, name = self._bytes(value, name)
        key = hashlib.sha256(self._settings + data).hexdigest()
        if key not in self._known:
            file = self._folder / f"{key}.npz"
            found = _find(file, key)
            self._known[key] = self._process(data, name, key, file) if found is None else found
        return self._known[key]

    def close(self) -> None:
        """Removes the folder of the reader's own, if it has one, and its pictures with it. Idempotent."""
        if self._own is not None:
            self._own.cleanup()

    def _bytes(self, value: Any, name: str) -> tuple[bytes, str]:
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
        file = Path(self._root).expanduser() / value.removeprefix("file://")
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

    def _process(self, data: bytes, name: str, key: str, file: Path) -> KeptPicture:
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(data)) as opened:
                width, height = opened.size
                if width * height > self._max_pixels:
                    raise RowError(
                        f"picture {name} has {width} x {height} pixels, above data.image_max_pixels = "
                        f"{self._max_pixels}: shrink it, or raise the limit"
                    )
                image = opened.convert("RGB")
            made = self._processor(images=[image], return_tensors="np")
        except UnidentifiedImageError as error:
            raise RowError(f"picture {name} ({len(data)} bytes) is of no known format") from error
        except (RowError, Image.DecompressionBombError) as error:
            raise RowError(str(error)) from error
        # What decoders raise for damaged files; the processor refuses extreme shapes with ValueError.
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            raise RowError(f"picture {name} ({len(data)} bytes) is damaged or unfit: {error}") from error
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
        return KeptPicture(key, file, picture.grid, merge)


def _write(file: Path, picture: Picture) -> None:
    with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as part:
        np.savez(
            part,
            codes=picture.codes,
            values_CV=picture.values_CV,
            frames=picture.frames,
            grid=np.asarray([*picture.grid, picture.merge]),
        )
    Path(part.name).replace(file)


def _find(file: Path, key: str) -> KeptPicture | None:
    """What an earlier run kept under this key."""
    if not file.is_file():
        return None
    with np.load(file) as kept:
        frames, rows, columns, merge = (int(side) for side in kept["grid"])
    return KeptPicture(key, file, (frames, rows, columns), merge)
