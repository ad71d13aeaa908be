"""Rules of pictures: who sees them, and who is trained on them."""

from collections.abc import Iterator

from relax_core.config.problems import Problem
from relax_core.config.rules.rule import Check
from relax_core.data.config import DataConfig
from relax_core.loop.config import TeacherConfig
from relax_core.model.lora_config import LoraConfig
from relax_core.model.settings import ModelSettings


def _pictures_are_seen(data: DataConfig, model: ModelSettings) -> Iterator[Problem]:
    """Pictures of rows need the tower that reads them."""
    if data.images_key is not None and model.vision == "absent":
        yield Problem(
            ("model", "vision"),
            f"data.images_key {data.images_key!r} gives pictures, and without its tower the model sees none",
            given="absent",
            allowed="frozen or trained, or data.images_key null",
            nearest="frozen",
        )


def _a_tower_has_pictures(data: DataConfig, model: ModelSettings) -> Iterator[Problem]:
    """Without pictures a tower only takes memory."""
    if data.images_key is None and model.vision != "absent":
        yield Problem(
            ("model", "vision"),
            "data.images_key is null: no row has a picture",
            given=model.vision,
            allowed="absent, or data.images_key the key of the pictures",
            nearest="absent",
        )


def _teachers_see_pictures(model: ModelSettings, teacher: TeacherConfig) -> Iterator[Problem]:
    """A teacher in servers is sent tokens alone, and would judge pictures that it does not see."""
    if model.vision != "absent" and teacher.urls:
        yield Problem(
            ("teacher", "urls"),
            f"model.vision {model.vision} gives samples pictures, and servers of a teacher are sent none",
            given=", ".join(teacher.urls),
            allowed="none: teacher.path, with which the trainer's own ranks score",
        )


def _adapters_leave_the_tower(model: ModelSettings, lora: LoraConfig) -> Iterator[Problem]:
    """Adapters are trained alone."""
    if model.vision == "trained" and lora.rank:
        yield Problem(
            ("model", "vision"),
            f"lora.rank {lora.rank} trains adapters alone",
            given="trained",
            allowed="frozen, or lora.rank 0",
            nearest="frozen",
        )


RULES = (
    Check(("data", "model"), _pictures_are_seen),
    Check(("data", "model"), _a_tower_has_pictures),
    Check(("model", "teacher"), _teachers_see_pictures),
    Check(("model", "lora"), _adapters_leave_the_tower),
)
