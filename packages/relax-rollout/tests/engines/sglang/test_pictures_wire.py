"""Pictures in a request to SGLang: the same bits come out at the server, at the same places."""

import json
import sys

import numpy as np
import pytest
from relax_rollout import InvalidRequestError, Request, SamplingParams
from relax_rollout.engines.checks import check_requests
from relax_rollout.engines.sglang.flight import Flight, to_body, to_single_body
from relax_rollout.engines.sglang.plugin import pictures as plugin
from relax_rollout.pictures import Picture, PlacedPicture


def picture(grid, *, noisy: bool) -> Picture:
    """Of few values to a channel, as a processor makes them, or of more than a byte tells apart."""
    draws = np.random.default_rng(3)
    shape = (grid[0] * grid[1] * grid[2], 3, 1, 16)
    numbers = draws.normal(size=shape) if noisy else draws.integers(0, 256, shape) / 127.5 - 1
    patches = np.repeat(numbers.astype(np.float32), 2, axis=2).reshape(shape[0], -1)
    return Picture.of(patches, grid, merge=2, channels=3, frames=2)


PLACED = (
    PlacedPicture(picture((1, 2, 4), noisy=False), 1),
    PlacedPicture(picture((1, 4, 4), noisy=True), 5),
)
SEEING = Request("a", tuple(range(1, 12)), SamplingParams(4), pictures=PLACED)
TEXT = Request("b", (1, 2), SamplingParams(4))


def arrived(item):
    """What SGLang's processor is given."""
    seen = {}
    plugin.around_process(lambda _, **options: seen.update(options), None, image_data=[item], input_text=[1])
    return seen["image_data"][0]


def test_the_patches_and_places_arrive_as_they_were():
    body = json.loads(json.dumps(to_single_body(Flight(SEEING, "0."))))
    assert body["input_ids"] == list(SEEING.prompt_ids)
    (item,) = body["image_data"]
    found = arrived(item)
    assert (found["format"], found["modality"]) == ("processor_output", "image")
    wanted = np.concatenate([one.picture.patches() for one in PLACED])
    assert found["pixel_values"].numpy().tobytes() == wanted.tobytes()
    assert found["image_grid_thw"].tolist() == [[1, 2, 4], [1, 4, 4]]
    # Two and four tokens; the places of the first and of the last.
    assert found["offsets"] == [(1, 2), (5, 8)]


def test_a_pixel_takes_a_byte_on_the_way():
    one = PlacedPicture(picture((1, 32, 32), noisy=False), 0)
    body = to_single_body(Flight(Request("c", (1,) * 256, SamplingParams(1), pictures=(one,)), "0."))
    pixels = 1024 * 3 * 16
    # Base64 makes four characters of three bytes; the table of values is small.
    assert len(json.dumps(body["image_data"])) < 4 / 3 * pixels + 10_000


def test_requests_without_pictures_have_none_among_others_and_no_field_alone():
    mixed = to_body([Flight(SEEING, "0."), Flight(TEXT, "1.")])
    assert [items[0] is None for items in mixed["image_data"]] == [False, True]
    assert "image_data" not in to_body([Flight(TEXT, "1.")])


def test_pictures_of_others_go_on_untouched():
    assert arrived("http://elsewhere/a.png") == "http://elsewhere/a.png"


def test_a_server_without_a_tower_refuses_pictures():
    with pytest.raises(InvalidRequestError, match="has pictures, and the engine has no vision tower"):
        check_requests([SEEING], (), vocabulary=100, context=100)
    check_requests([SEEING], (), vocabulary=100, context=100, patch=(96, 2))
    assert "sglang" not in sys.modules
