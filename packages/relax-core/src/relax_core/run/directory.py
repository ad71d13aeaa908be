"""The run directory: where everything a run leaves behind lives, and who may write to it."""

import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from relax_core.config.yaml_text import dump_yaml
from relax_core.run.files import RunDirectoryError, sync_folder, to_json, write_atomic, writing
from relax_core.run.lock import RunLock
from relax_core.run.secrets import Masker

if TYPE_CHECKING:
    from relax_core.config.root import RelaxConfig


class RunDirectory:
    """A locked run directory.

    `config.yaml`, `metrics.jsonl`, `samples.jsonl`, `alerts.jsonl`, `summary.json`, `log.txt` and the folders
    `tensorboard/`, `checkpoints/step_<n>/` and `hf/`, and `report.html`. Use `create` or `resume`, then
    `close` it or use `with`.
    """

    def __init__(self, path: Path, lock: RunLock) -> None:
        self.path = path
        self.mask = Masker()
        self._lock = lock

    @classmethod
    def create(cls, path: str | Path, config: "RelaxConfig") -> Self:
        """Makes a new run directory and writes its `config.yaml`.

        Args:
            path: a folder that does not exist yet, or is empty.
            config: the resolved config.

        Raises:
            RunDirectoryError: the folder is in use, holds a run or anything else, or cannot be written.
        """
        path = Path(path)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        directory = cls(path, RunLock(path))
        try:
            directory._refuse_unless_empty()
            directory.write_config(config)
            for folder in (directory.tensorboard, directory.checkpoints):
                with writing(folder):
                    folder.mkdir()
            sync_folder(path)
        except BaseException:
            directory.close()
            raise
        return directory

    @classmethod
    def resume(cls, path: str | Path) -> Self:
        """Opens the directory of an earlier run to go on with it.

        Raises:
            RunDirectoryError: there is no run, it is in use, or it cannot be written.
        """
        path = Path(path)
        if not (path / "config.yaml").is_file():
            raise RunDirectoryError(f"{path} holds no run: it has no config.yaml; give the folder of a run")
        return cls(path, RunLock(path))

    def _refuse_unless_empty(self) -> None:
        others = sorted(entry.name for entry in self.path.iterdir() if entry.name != ".lock")
        if not others:
            return
        again = "choose another --run.name"
        if self.finished:
            raise RunDirectoryError(f"{self.path} holds a finished run, which is never overwritten; {again}")
        if self.config.is_file():
            raise RunDirectoryError(
                f"{self.path} holds an unfinished run: `relax-train --resume {self.path}`, or {again}"
            )
        raise RunDirectoryError(
            f"{self.path} is not empty and holds no run ({', '.join(others[:5])}); {again} or --run.dir"
        )

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Sampled completions, one JSON object each."""
        return self.path / "samples.jsonl"

    @property
    def alerts(self) -> Path:
        """What the run warned of, one JSON object each."""
        return self.path / "alerts.jsonl"

    @property
    def summary(self) -> Path:
        """The outcome; it exists once the run is finished."""
        return self.path / "summary.json"

    @property
    def log(self) -> Path:
        """Log lines."""
        return self.path / "log.txt"

    def trace(self, resume_step: int | None) -> Path:
        """The timeline of the run, or of its part from the checkpoint of a step on."""
        return self.path / ("trace.json" if resume_step is None else f"trace-after-{resume_step}.json")

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints, `step_<n>` each."""
        return self.path / "checkpoints"

    @property
    def hf(self) -> Path:
        """The exported Hugging Face directory."""
        return self.path / "hf"

    @property
    def report(self) -> Path:
        """The page that `relax-report` draws."""
        return self.path / "report.html"

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.summary.is_file()

    def steps_done(self) -> int:
        """The steps of a finished run, as its summary says.

        Raises:
            RunDirectoryError: there is no summary, or it is damaged.
        """
        steps: int = self.read_summary()["steps"]
        return steps

    def read_summary(self) -> dict[str, Any]:
        """The outcome of a finished run; raises like `steps_done`."""
        try:
            summary = json.loads(self.summary.read_bytes())
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"{self.summary} cannot be read: {error}") from error
        if not isinstance(summary, dict) or not isinstance(summary.get("steps"), int):
            raise RunDirectoryError(f"{self.summary} cannot be read: it is no summary of a run")
        return summary

    def reopen(self, config: "RelaxConfig") -> None:
        """Prepares to go on with the run.

        Writes its config as it is now, takes the end mark away, and clears what a killed process left half
        written.
        """
        self.write_config(config)
        for left in (*self.path.glob(".*.tmp"), *self.path.glob(f".{self.hf.name}.*")):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
        with writing(self.summary):
            self.summary.unlink(missing_ok=True)

    def write_config(self, config: "RelaxConfig") -> None:
        """Replaces `config.yaml`."""
        write_atomic(self.config, dump_yaml(self.mask.tree(config.model_dump(mode="json"))).encode())

    def write_text(self, path: Path, text: str) -> None:
        """Writes masked text atomically.

        Raises:
            RunDirectoryError: the disk is full or the place is not writable.
        """
        write_atomic(path, self.mask(text).encode())

    def write_json(self, path: Path, value: Any) -> None:
        """Writes masked, indented JSON atomically; raises like `write_text`."""
        write_atomic(path, (to_json(self.mask.tree(value), indent=2) + "\n").encode())

    def close(self) -> None:
        """Gives the lock back. Idempotent."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
