"""Supervised fine-tuning on pictures, from files to an exported model; and what is refused."""

import base64
import errno
import json
import os
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from relax_bridge import Checkpoint, model_map, write_checkpoint
from relax_core.config.root import RelaxConfig
from relax_core.data import DataConfig, DataError, load_samples, load_tokenizer
from relax_core.data.arithmetic_tokenizer import write_arithmetic_tokenizer
from relax_core.data.picture_maker import PictureMaker
from relax_core.data.pictures import PictureReader
from relax_core.loop import run
from relax_core.run import RunDirectory

TEMPLATE = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.content is string %}{{- m.content }}{%- else %}
{%- for part in m.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}
{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
COLOURS = {"1": (255, 0, 0), "2": (0, 255, 0), "3": (0, 0, 255), "4": (255, 255, 255)}


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory, small_config) -> Path:
    """A Hugging Face directory with tower, tokenizer and image processor; random weights, a draft layer."""
    from transformers import AutoTokenizer

    bare = tmp_path_factory.mktemp("seeing")
    write_arithmetic_tokenizer(bare)
    tokenizer = AutoTokenizer.from_pretrained(bare)
    added = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *added]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(bare)
    patches = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 64, "longest_edge": 1024},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        **patches,
    }
    (bare / "preprocessor_config.json").write_text(json.dumps(processor))
    text = {
        **small_config,
        "vocab_size": -(-len(tokenizer) // 16) * 16,
        "mtp_num_hidden_layers": 1,
        "eos_token_id": 2,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "rope_parameters": {**small_config["rope_parameters"], "mrope_section": [2, 1, 1]},
    }
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": False,
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "text_config": text,
        "vision_config": {
            "model_type": "qwen3_5",
            "depth": 1,
            "hidden_size": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 20,
            "num_heads": 2,
            "in_channels": 3,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [],
        },
    }
    (bare / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.1 if len(shape) > 1 else 0.3)
        for name, shape in model_map(config, vision=True).hf_shapes().items()
    }
    return write_checkpoint(
        tmp_path_factory.mktemp("seeing") / "model", tensors, like=Checkpoint.open(bare, weights=False)
    )


def paint(file: Path, colour, size=(16, 8)) -> str:
    from PIL import Image

    Image.new("RGB", size, colour).save(file)
    return file.name


def caption(image, answer, text="<image>what?"):
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": answer}]
    return {"conversations": turns, "images": [image]}


@pytest.fixture
def write_task(tmp_path):
    """Writes rows to a file beside their pictures."""

    def write(rows) -> str:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / "rows.jsonl")

    return write


@pytest.fixture
def data_config(write_task):
    def make(*rows, **settings) -> DataConfig:
        keys = {"messages_key": "conversations", "prompt_key": None, "images_key": "images"}
        return DataConfig(path=write_task(rows), **keys, **settings)

    return make


@pytest.fixture
def load(seeing_model):
    """Samples as the loop loads them."""

    def samples(cfg: DataConfig):
        config = json.loads((seeing_model / "config.json").read_text())
        reader = PictureReader.open(seeing_model, config, cfg)
        return reader, load_samples(cfg, load_tokenizer(seeing_model), seed=0, pictures=reader)

    return samples


def test_captions_are_learnt_from_pictures_alone(tmp_path, seeing_model, write_task, monkeypatch):
    """Every prompt is the same text: only who sees the picture can tell the four colours apart."""
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "own"))
    rows = [caption(paint(tmp_path / f"{digit}.png", rgb), digit) for digit, rgb in COLOURS.items()] * 4
    config = RelaxConfig.model_validate(
        {
            "run": {"steps": 30, "device": "cpu", "progress": "none", "threads": 1, "name": "pictures"},
            "model": {"path": str(seeing_model), "vision": "trained"},
            "algorithm": {"name": "sft"},
            "mtp": {"loss_coefficient": 0.2},
            "data": {
                "path": write_task(rows),
                "eval_path": write_task(rows),
                "messages_key": "conversations",
                "prompt_key": None,
                "images_key": "images",
            },
            "trainer": {"lr": 1e-2, "precision": "fp32"},
            "sft": {"samples_per_step": 16},
            "eval": {"every": 0},
            "checkpoint": {"every": 0},
        }
    )
    with RunDirectory.create(tmp_path / "run", config) as directory:
        assert run(config, directory, resume=False) == "finished"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # The answer and the end of the turn: ln(4) / 2 = 0.69 for who answers without seeing.
    assert lines[1]["sft_loss"] > 1
    assert lines[-1]["sft_loss"] < 0.1
    assert lines[-1]["eval_perplexity"] < 1.2
    assert not list((tmp_path / "own").glob("relax-pictures-*")), "the run's own folder ends with it"
    before, after = Checkpoint.open(seeing_model), Checkpoint.open(tmp_path / "run" / "hf")
    name = "model.visual.merger.linear_fc1.weight"
    assert before.names == after.names
    assert not torch.equal(before.tensor(name), after.tensor(name))


def test_a_picture_has_as_many_tokens_as_the_processor_says(load, data_config, tmp_path):
    wide, tall = paint(tmp_path / "wide.png", (9, 9, 9), (16, 8)), paint(tmp_path / "tall.png", 9, (8, 24))
    row = caption(wide, "1", text="<image> and <image>?")
    row["images"].append(tall)
    reader, data = load(data_config(row))
    (sample,) = data.train
    # 4 x 4 pixels a patch, 2 x 2 patches a token: 2 x 1 and 1 x 3 squares of 8 pixels.
    assert [(one.kept.grid, one.kept.tokens) for one in sample.pictures] == [((1, 2, 4), 2), ((1, 6, 2), 3)]
    places = [i for i, token in enumerate(sample.ids) if token == reader.token_id]
    starts = [one.start for one in sample.pictures]
    assert places == [*range(starts[0], starts[0] + 2), *range(starts[1], starts[1] + 3)]
    assert not sample.loss_mask[places].any()
    assert sample.loss_mask.sum() == 2


def test_the_patches_are_the_processors_own(load, data_config, seeing_model, tmp_path):
    from PIL import Image
    from transformers import Qwen2VLImageProcessorPil

    noise = torch.randint(0, 256, (24, 40, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(noise.numpy()).save(tmp_path / "noise.png")
    _, data = load(data_config(caption("noise.png", "1")))
    kept = data.train[0].pictures[0].kept.load()
    processor = Qwen2VLImageProcessorPil.from_pretrained(seeing_model)
    wanted = processor(images=[Image.open(tmp_path / "noise.png")], return_tensors="np")
    assert list(kept.grid) == wanted["image_grid_thw"][0].tolist()
    assert (kept.patches() == wanted["pixel_values"]).all()


def test_a_picture_is_processed_once_for_all_rows_and_runs(load, data_config, tmp_path, monkeypatch):
    rows = [caption(paint(tmp_path / "a.png", (1, 2, 3)), digit) for digit in "12"]
    cfg = data_config(*rows, image_cache=tmp_path / "kept")
    calls = []
    make = PictureMaker.make
    monkeypatch.setattr(PictureMaker, "make", lambda *args: calls.append(args) or make(*args))
    first = load(cfg)[1]
    again = load(cfg)[1]
    assert len(calls) == 1
    assert [s.pictures[0].kept.key for s in first.train] == [s.pictures[0].kept.key for s in again.train]
    assert first.stream().state_dict() == again.stream().state_dict()


def test_pictures_processed_in_a_worker_are_the_same_bytes(load, data_config, tmp_path):
    rows = [caption(paint(tmp_path / f"{digit}.png", rgb), digit) for digit, rgb in COLOURS.items()]
    plain = load(data_config(*rows, image_cache=tmp_path / "plain"))[1]
    # The worker writes into the folder of the reader that it was given a copy of.
    _reader, spread = load(data_config(*rows, workers=1))
    for one, same in zip(plain.train, spread.train, strict=True):
        assert one.ids.tolist() == same.ids.tolist()
        (first,), (second,) = one.pictures, same.pictures
        assert (first.start, first.kept.key) == (second.start, second.kept.key)
        assert first.kept.load().digest() == second.kept.load().digest()
    assert spread.stream().state_dict() == plain.stream().state_dict()


def test_messages_of_parts_and_bytes_of_a_column_store_give_the_same(load, data_config, tmp_path):
    name = paint(tmp_path / "a.png", (1, 2, 3))
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    inline = [{"type": "image", "image": name}, {"type": "text", "text": "what?"}]
    answer = {"role": "assistant", "content": "1"}
    rows = [
        caption(name, "1"),
        {"conversations": [{"role": "user", "content": parts}, answer], "images": name},
        {"conversations": [{"role": "user", "content": inline}, answer]},
    ]
    _, data = load(data_config(*rows))
    assert len({tuple(sample.ids.tolist()) for sample in data.train}) == 1
    assert len({sample.pictures[0].kept.key for sample in data.train}) == 1
    import pyarrow
    import pyarrow.parquet

    stored = {"bytes": (tmp_path / name).read_bytes(), "path": name}
    row = {**rows[0], "images": [stored]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    cfg = data_config().model_copy(update={"path": str(tmp_path / "rows.parquet")})
    _, from_parquet = load(cfg)
    assert from_parquet.train[0].ids.tolist() == data.train[0].ids.tolist()
    assert from_parquet.train[0].pictures[0].kept.key == data.train[0].pictures[0].kept.key


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "bad.png .11 bytes. is of no known format"),
        ({"image_max_mib": 1e-5}, "bad.png has 11 bytes, above data.image_max_mib = "),
    ],
)
def test_what_is_no_picture_or_too_large_is_refused_by_name(load, data_config, tmp_path, settings, reason):
    (tmp_path / "bad.png").write_bytes(b"not a photo")
    with pytest.raises(DataError, match=reason):
        load(data_config(caption("bad.png", "1"), **settings))


def test_damaged_missing_vast_and_foreign_pictures_are_refused_by_name(load, data_config, tmp_path):
    whole = tmp_path / paint(tmp_path / "whole.png", (1, 2, 3), (64, 64))
    (tmp_path / "half.png").write_bytes(whole.read_bytes()[:-60])
    paint(tmp_path / "vast.png", (1, 2, 3), (64, 65))
    for image, reason in (
        ("half.png", r"half.png \(\d+ bytes\) is damaged"),
        ("none.png", "none.png cannot be read: No such file"),
        ("https://example.org/a.png", "nothing is downloaded"),
        (7, "must be a path or bytes of a picture, not int"),
        ("vast.png", "vast.png has 64 x 65 pixels, above data.image_max_pixels = 4096"),
    ):
        with pytest.raises(DataError, match=reason):
            load(data_config(caption(image, "1"), image_max_pixels=4096))


def test_odd_pictures_are_read_as_pillow_shows_them(load, data_config, tmp_path):
    """CMYK, grey, with a palette, with transparency, and of a single pixel."""
    from PIL import Image
    from transformers import Qwen2VLImageProcessorPil

    noise = torch.randint(0, 256, (16, 24, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    of = Image.fromarray
    pictures = {
        "cmyk.jpg": of(noise.numpy(), mode="CMYK"),
        "grey.png": of(noise[..., 0].contiguous().numpy()),
        "palette.png": of(noise[..., :3].contiguous().numpy()).quantize(16),
        "clear.png": of(noise.numpy(), mode="RGBA"),
        "dot.png": Image.new("RGB", (1, 1), (9, 80, 200)),
    }
    for name, image in pictures.items():
        image.save(tmp_path / name)
    reader, data = load(data_config(*[caption(name, "1") for name in pictures]))
    for name, sample in zip(pictures, data.train, strict=True):
        kept = sample.pictures[0].kept.load()
        shown = Image.open(tmp_path / name).convert("RGB")
        wanted = reader._maker._processor(images=[shown], return_tensors="np")
        assert (kept.patches() == wanted["pixel_values"]).all(), name
        assert isinstance(reader._maker._processor, Qwen2VLImageProcessorPil)
    # One pixel is enlarged to the smallest picture that the processor makes: 8 x 8 pixels, here one token.
    assert data.train[-1].pictures[0].kept.tokens == 1


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif"])
def test_pictures_are_turned_as_the_camera_says_and_as_transformers_does(load, data_config, tmp_path, name):
    from PIL import Image
    from transformers.image_utils import load_image

    noise = torch.randint(0, 256, (8, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    rows = []
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        Image.fromarray(noise.numpy()).save(tmp_path / f"{turn}{name}", exif=exif)
        rows.append(caption(f"{turn}{name}", "1"))
    reader, data = load(data_config(*rows))
    grids = set()
    for turn, sample in enumerate(data.train, start=1):
        kept = sample.pictures[0].kept.load()
        wanted = reader._maker._processor(
            images=[load_image(str(tmp_path / f"{turn}{name}"))], return_tensors="np"
        )
        assert (kept.patches() == wanted["pixel_values"]).all()
        grids.add(kept.grid)
    assert grids == {(1, 2, 6), (1, 6, 2)}


def test_a_full_disk_is_named_with_its_cure_and_left_clean(load, data_config, tmp_path, monkeypatch):
    paint(tmp_path / "a.png", COLOURS["1"])

    def fill(stream, **_):
        stream.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", fill)
    cache = tmp_path / "cache"
    cfg = data_config(caption("a.png", "1")).model_copy(update={"image_cache": cache})
    with pytest.raises(DataError, match=rf"kept in {cache}: No space left on device. Set data.image_cache"):
        load(cfg)
    assert list(cache.iterdir()) == []


def test_a_picture_with_odd_exif_data_is_turned_all_the_same(load, data_config, tmp_path):
    """Its width is text there, which Pillow reads and cannot write anew."""
    from PIL import Image, ImageOps

    width, orientation = (0x0100, 2, 2, 0x4141), (0x0112, 3, 1, 6)
    entries = b"".join(struct.pack("<HHII", *entry) for entry in (width, orientation))
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + entries + bytes(4)
    noise = torch.randint(0, 256, (8, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    picture = Image.fromarray(noise.numpy())
    picture.save(tmp_path / "odd.png", exif=exif)
    with pytest.raises(struct.error), Image.open(tmp_path / "odd.png") as opened:
        ImageOps.exif_transpose(opened)
    picture.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "turned.png")
    _, data = load(data_config(caption("odd.png", "1"), caption("turned.png", "1")))
    odd, turned = (sample.pictures[0].kept.load().patches() for sample in data.train)
    assert (odd == turned).all()


def test_whatever_a_decoder_raises_is_a_damaged_picture(load, data_config, tmp_path):
    """A second page without its size: Pillow raises TypeError as it counts the pages."""
    paint(tmp_path / "a.tif", 9)
    whole = bytearray((tmp_path / "a.tif").read_bytes())
    first = int.from_bytes(whole[4:8], "little")
    after = first + 2 + 12 * int.from_bytes(whole[first : first + 2], "little")
    whole[after : after + 4] = len(whole).to_bytes(4, "little")
    (tmp_path / "a.tif").write_bytes(whole + bytes(6))
    with pytest.raises(DataError, match=r"a.tif \(\d+ bytes\) is damaged: Missing dimensions"):
        load(data_config(caption("a.tif", "1")))


def test_animated_thin_and_wide_pixelled_pictures_are_refused_by_name(load, data_config, tmp_path):
    from PIL import Image

    frames = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 99, 200)]
    for name in ("a.gif", "a.png", "a.webp"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], duration=40)
    paint(tmp_path / "thin.png", 9, (2010, 10))
    Image.new("I;16", (8, 8), 40000).save(tmp_path / "deep.png")
    for image, reason in (
        *((name, f"{name} has 3 frames: give one still picture") for name in ("a.gif", "a.png", "a.webp")),
        ("thin.png", r"thin.png \(\d+ bytes\) is unfit: .*aspect ratio"),
        ("deep.png", "deep.png has pixels of mode I;16"),
    ):
        with pytest.raises(DataError, match=reason):
            load(data_config(caption(image, "1")))


def test_what_pillow_takes_for_a_bomb_is_refused_by_name(load, data_config, tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    paint(tmp_path / "bomb.png", 9, (40, 40))
    with pytest.raises(DataError, match=r"bomb.png \(\d+ bytes\) is too large to decode"):
        load(data_config(caption("bomb.png", "1")))


def test_pictures_and_their_places_must_be_as_many(load, data_config, tmp_path):
    name = paint(tmp_path / "a.png", (1, 2, 3))
    for text, reason in (
        ("what?", "0 places for pictures .* the row 1 pictures"),
        ("<image><image>", "2 places for pictures .* the row 1 pictures"),
        ("<image><|image_pad|>", "stands for pictures alone"),
    ):
        with pytest.raises(DataError, match=reason):
            load(data_config(caption(name, "1", text=text)))


def test_a_cut_through_a_picture_is_refused(load, data_config, tmp_path):
    name = paint(tmp_path / "a.png", (1, 2, 3), (32, 32))
    row = caption(name, "1")
    row["conversations"] = [
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "b"},
        *row["conversations"],
    ]
    _, data = load(data_config(row))
    start = data.train[0].pictures[0].start
    with pytest.raises(DataError, match="cuts picture 1, whose 16 tokens begin at"):
        load(data_config(row, max_tokens=start + 5, overlong="truncate"))
    _, cut = load(data_config(row, max_tokens=start - 1, overlong="truncate"))
    assert cut.train[0].pictures == ()


def test_held_out_captions_have_pictures_of_their_own(load, data_config, tmp_path):
    rows = [caption(paint(tmp_path / f"{digit}.png", rgb), digit) for digit, rgb in COLOURS.items()] * 2
    _, data = load(data_config(*rows, eval_fraction=0.25))
    assert (len(data.train), len(data.held_out)) == (6, 2)
    assert not {s.pictures[0].kept.key for s in data.train} & {s.pictures[0].kept.key for s in data.held_out}


def test_paths_start_from_the_folder_of_each_source(load, data_config, tmp_path):
    """One picture's name in three folders, for rows of the first source, of a second and held out."""
    cfg = data_config(caption("a.png", "1"))
    paint(tmp_path / "a.png", COLOURS["1"])
    others = {}
    for folder, digit in (("second", "2"), ("held", "3")):
        (tmp_path / folder).mkdir()
        paint(tmp_path / folder / "a.png", COLOURS[digit])
        others[folder] = tmp_path / folder / "rows.jsonl"
        others[folder].write_text(json.dumps(caption("a.png", digit)))
    cfg = cfg.model_copy(update={"mixture": {str(others["second"]): 1.0}, "eval_path": str(others["held"])})
    _, data = load(cfg)
    seen = [sample.pictures[0].kept for sample in (*data.train, *data.held_out)]
    assert [kept.source for kept in seen] == [str(tmp_path / f / "a.png") for f in ("", "second", "held")]
    colours = [tuple(kept.load().patches()[0, ::32] > 0) for kept in seen]
    assert colours == [tuple(part == 255 for part in COLOURS[digit]) for digit in "123"]


def test_bytes_in_json_lines_are_refused(load, data_config, tmp_path):
    text = base64.b64encode((tmp_path / paint(tmp_path / "a.png", 1)).read_bytes()).decode()
    with pytest.raises(DataError, match="cannot be read"):
        load(data_config(caption(text, "1")))
