"""Pictures of rows: found, checked, decoded and processed once, and kept in a folder until they are drawn."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_rollout.pictures import Grid, Picture, PlacedPicture

from relax_core.data.config import DataConfig
from relax_core.data.picture_maker import DAMAGE, PictureMaker, find_kept, read_kept, warn_of_damage
from relax_core.data.problems import DataError


@dataclass(frozen=True, slots=True)
class KeptPicture:
    """A processed picture in a folder.

    Attributes:
        key: digest of its bytes and of the processor's settings.
        file: where it lies.
        grid, merge: see `Picture`.
        source: the path that it was read from; bytes of a row are not held, and it is then their name.
        maker: made it.
    """

    key: str
    file: Path
    grid: Grid
    merge: int
    source: str
    maker: PictureMaker

    @property
    def tokens(self) -> int:
        """Tokens that stand for the picture."""
        count, rows, columns = self.grid
        return count * rows * columns // self.merge**2

    def load(self) -> Picture:
        """The picture itself, made again from its source where the file is damaged.

        Raises:
            RowError: the source is not there any more, or is another picture now.
        """
        try:
            return read_kept(self.file)
        except DAMAGE as error:
            warn_of_damage(self.file, error)
        self.maker.make_again(self.source, self.key, self.file)
        return read_kept(self.file)


@dataclass(frozen=True, slots=True)
class SamplePicture:
    """A picture of a prompt or sample and the place of its first token there."""

    kept: KeptPicture
    start: int

    def load(self) -> PlacedPicture:
        """The picture itself, at its place."""
        return PlacedPicture(self.kept.load(), self.start)


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
        self._maker = PictureMaker(processor, cfg)
        # A folder of the reader's own ends with it: it must live as long as pictures are loaded.
        self._own = tempfile.TemporaryDirectory(prefix="relax-pictures-") if cfg.image_cache is None else None
        self._folder = Path(self._own.name) if self._own else Path(str(cfg.image_cache)).expanduser()
        self._folder.mkdir(parents=True, exist_ok=True)
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

    def read(self, value: Any, name: str, folder: Path | None) -> KeptPicture:
        """The picture that a row gives: a path, bytes, or {bytes, path} as column stores have it.

        See `PictureMaker.bytes_of`.

        Raises:
            RowError: it cannot be read, is too large or is no picture; names it, with its size.
        """
        data, name = self._maker.bytes_of(value, name, folder)
        key = self._maker.key(data)
        if key not in self._known:
            file = self._folder / f"{key}.npz"
            grid, merge = find_kept(file) or self._maker.make(data, name, file)
            self._known[key] = KeptPicture(key, file, grid, merge, name, self._maker)
        return self._known[key]

    def close(self) -> None:
        """Removes the folder of the reader's own, if it has one, and its pictures with it. Idempotent."""
        if self._own is not None:
            self._own.cleanup()


def open_reader(cfg: DataConfig, path: str | Path, config: Mapping[str, Any]) -> PictureReader | None:
    """See `PictureReader.open`; None where rows have no pictures. Close it at the end."""
    return None if cfg.images_key is None else PictureReader.open(path, config, cfg)
