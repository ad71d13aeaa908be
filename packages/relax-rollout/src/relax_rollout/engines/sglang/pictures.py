"""Pictures on their way to SGLang: as what its processor would have made of them.

SGLang takes ``image_data`` of the format "processor_output" as it is: it neither decodes the prompt nor
tokenises it again, and finds the pictures by ``offsets`` in the very ids that were sent. It wants tensors,
which JSON cannot carry: the plugin makes them of what is written here, a byte for a pixel.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relax_rollout.pictures import Picture, PlacedPicture

FORMAT = "processor_output"
PICTURES = "relax_pictures"


def to_item(pictures: Sequence[PlacedPicture]) -> dict[str, Any] | None:
    """All pictures of a prompt as one item of ``image_data``; None if it has none."""
    if not pictures:
        return None
    return {"format": FORMAT, PICTURES: [_packed(one) for one in pictures]}


def from_item(item: Mapping[str, Any]) -> list[PlacedPicture]:
    """The pictures that :func:`to_item` wrote."""
    return [_unpacked(fields) for fields in item[PICTURES]]


def _packed(one: PlacedPicture) -> dict[str, Any]:
    picture = one.picture
    return {
        "start": one.start,
        "grid": list(picture.grid),
        "merge": picture.merge,
        "frames": picture.frames,
        "codes": _array(picture.codes),
        "values": _array(picture.values_CV),
    }


def _unpacked(fields: Mapping[str, Any]) -> PlacedPicture:
    frames, rows, columns = fields["grid"]
    codes, values = _numbers(fields["codes"]), _numbers(fields["values"])
    picture = Picture((frames, rows, columns), fields["merge"], codes, values, fields["frames"])
    return PlacedPicture(picture, fields["start"])


def _array(numbers: Any) -> dict[str, Any]:
    whole = np.ascontiguousarray(numbers)
    text = base64.b64encode(whole.tobytes()).decode("ascii")
    return {"dtype": str(whole.dtype), "shape": list(whole.shape), "base64": text}


def _numbers(fields: Mapping[str, Any]) -> Any:
    flat = np.frombuffer(base64.b64decode(fields["base64"]), dtype=np.dtype(fields["dtype"]))
    return flat.reshape(fields["shape"])
