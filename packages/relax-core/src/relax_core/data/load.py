"""Opens a data set: reads, tokenises and splits it, all before the first step.

Rows are read and tokenised some at a time, and what exceeds some megabytes waits in a file, so that a data
set may be larger than memory.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from relax_core.data.config import DataConfig
from relax_core.data.examples import Example, Pair, Prompt, Sample
from relax_core.data.fields import wanted_keys
from relax_core.data.mixture import MixedStream
from relax_core.data.pairs import PairBuilder
from relax_core.data.pictures import PictureReader
from relax_core.data.prepare import Builder, Preparation, preparation
from relax_core.data.problems import BadRow, BadRows, DataError
from relax_core.data.prompts import PromptBuilder
from relax_core.data.rows import Rows
from relax_core.data.samples import SampleBuilder
from relax_core.data.sources import read_rows, refuse_shared_files
from relax_core.data.split import held_out_of
from relax_core.data.store import ExampleFile, Examples
from relax_core.data.stream import ExampleStream
from relax_core.data.text import TextBuilder, in_blocks
from relax_core.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_CHUNK_ROWS = 64

E = TypeVar("E", bound=Example)


@dataclass(frozen=True)
class DataSet(Generic[E]):
    """Everything that is trained on and held out.

    Attributes:
        train: in order of rows.
        held_out: in order of rows; may be empty.
        bad_rows: rows that were skipped, of both.
        seed: of the order in which `train` is drawn.
        shuffle: whether there is such an order.
        mixture: the sources that `train` is made of, with their weights; empty if there is one.
    """

    train: Examples[E]
    held_out: Examples[E]
    bad_rows: tuple[BadRow, ...]
    seed: int
    shuffle: bool
    mixture: tuple[tuple[Examples[E], float], ...] = ()

    def stream(self) -> ExampleStream[E]:
        """Draws from `train` without end, from the beginning."""
        if self.mixture:
            return MixedStream(self.mixture, seed=self.seed, shuffle=self.shuffle)
        return ExampleStream(self.train, seed=self.seed, shuffle=self.shuffle)


def load_prompts(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    tools: Sequence[Any] = (),
    pictures: PictureReader | None = None,
) -> DataSet[Prompt]:
    """Prompts to complete and score.

    Args:
        cfg: the settings.
        tokenizer: of the model.
        seed: of the run; `data.seed` takes its place if set.
        tools: descriptions for the chat template, where a row has none of its own.
        pictures: reads those of rows; None where they have none.

    Raises:
        DataError: a source cannot be read, has too many bad rows, or nothing is left.
    """
    return _load(cfg, PromptBuilder(cfg, tokenizer, tools, pictures), seed)


def load_held_out_prompts(
    cfg: DataConfig,
    path: str,
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Any] = (),
    pictures: PictureReader | None = None,
) -> Examples[Prompt]:
    """Prompts of another held-out set, by the same settings.

    Args:
        cfg: the settings.
        path: of its rows.
        tokenizer: of the model.
        tools, pictures: see `load_prompts`.

    Raises:
        DataError: it cannot be read, has too many bad rows, or nothing is left.
    """
    with preparation(PromptBuilder(cfg, tokenizer, tools, pictures), cfg.workers) as prepared:
        return _load_held_out(cfg, path, prepared, ExampleFile())[0]


def load_samples(
    cfg: DataConfig, tokenizer: Tokenizer, *, seed: int, pictures: PictureReader | None = None
) -> DataSet[Sample]:
    """Samples to learn from, with the pictures that `pictures` reads, or blocks of documents if the settings
    name a key of text; further arguments and errors as `load_prompts`."""
    if cfg.text_key is not None:
        return in_blocks(_load(cfg, TextBuilder(cfg, tokenizer), seed), cfg)
    return _load(cfg, SampleBuilder(cfg, tokenizer, pictures), seed)


def load_pairs(
    cfg: DataConfig, tokenizer: Tokenizer, *, seed: int, pictures: PictureReader | None = None
) -> DataSet[Pair]:
    """Pairs to prefer one of; arguments and errors as `load_prompts`."""
    read = (*cfg.metadata_keys, cfg.chosen_key, cfg.rejected_key)
    return _load(cfg.model_copy(update={"metadata_keys": read}), PairBuilder(cfg, tokenizer, pictures), seed)


def _load(cfg: DataConfig, builder: Builder[E], seed: int) -> DataSet[E]:
    """All sources; held-out rows of their own come with the first."""
    refuse_shared_files((cfg.path, *cfg.mixture))
    file = ExampleFile[E]()
    with preparation(builder, cfg.workers) as prepared:
        first = _load_source(cfg, prepared, seed, file)
        others = [
            _load_source(cfg.model_copy(update={"path": path, "eval_path": None}), prepared, seed, file)
            for path in cfg.mixture
        ]
    if not others:
        return first
    every = [first, *others]
    held_out = first.held_out.followed_by([one.held_out for one in others])
    train = first.train.followed_by([one.train for one in others])
    _warn_of_overlap(train, held_out)
    weights = (1.0, *cfg.mixture.values())
    for one, weight, name in zip(every, weights, (cfg.path, *cfg.mixture), strict=True):
        logger.info(
            "data: %s: %d to train on, %.3g of all draws", name, len(one.train), weight / sum(weights)
        )
    return DataSet(
        train,
        held_out,
        tuple(row for one in every for row in one.bad_rows),
        first.seed,
        first.shuffle,
        tuple((one.train, weight) for one, weight in zip(every, weights, strict=True)),
    )


def _load_source(cfg: DataConfig, prepared: Preparation[E], seed: int, file: ExampleFile[E]) -> DataSet[E]:
    seed = seed if cfg.seed is None else cfg.seed
    rows = read_rows(
        cfg.path,
        wanted_keys(cfg),
        subset=cfg.hub_subset,
        split=cfg.hub_split,
        revision=cfg.hub_revision,
    )
    examples, bad_rows = _build(islice(rows, cfg.limit), prepared, cfg.path, cfg.max_bad_rows, file)
    if cfg.eval_path is None:
        apart = held_out_of(examples, cfg.eval_fraction, seed)
        train, held_out = examples.chosen(~apart), examples.chosen(apart)
    else:
        train = examples
        held_out, bad_held_out = _load_held_out(cfg, cfg.eval_path, prepared, file)
        bad_rows += bad_held_out
        _warn_of_overlap(train, held_out)
    logger.info("data: %d to train on, %d held out", len(train), len(held_out))
    return DataSet(train, held_out, bad_rows, seed, cfg.shuffle)


def _load_held_out(
    cfg: DataConfig, path: str, prepared: Preparation[E], file: ExampleFile[E]
) -> tuple[Examples[E], tuple[BadRow, ...]]:
    same = path == cfg.path
    rows = read_rows(
        path,
        wanted_keys(cfg),
        subset=cfg.hub_subset if same else None,
        split=cfg.hub_eval_split,
        revision=cfg.hub_revision if same else None,
    )
    return _build(rows, prepared, path, cfg.max_bad_rows, file)


def _build(
    rows: Rows, prepared: Preparation[E], source: str, max_bad_rows: int, file: ExampleFile[E]
) -> tuple[Examples[E], tuple[BadRow, ...]]:
    bad_rows = BadRows(max_bad_rows)
    left_out = cut = 0

    def made() -> Iterator[E]:
        nonlocal left_out, cut
        for chunk in prepared(iter(lambda: list(islice(rows, _CHUNK_ROWS)), [])):
            for row in chunk.bad_rows:
                bad_rows.add(row)
            left_out += chunk.left_out
            cut += chunk.cut
            yield from chunk.examples

    examples = file.keep(made())
    skipped = bad_rows.settle(source)
    if left_out or cut:
        logger.warning("%s: %d examples above data.max_tokens left out, %d cut", source, left_out, cut)
    if not len(examples):
        raise DataError(f"{source} gives no example: it is empty, or every row was skipped")
    return examples, skipped


def _warn_of_overlap(train: Examples[E], held_out: Examples[E]) -> None:
    if not held_out:
        return
    apart = Counter(example.prompt_text for example in held_out)
    both = sum(apart.pop(example.prompt_text, 0) for example in train)
    if both:
        logger.warning("%d of %d held-out prompts are trained on as well", both, len(held_out))
