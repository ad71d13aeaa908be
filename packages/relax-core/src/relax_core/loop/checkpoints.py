"""Hugging Face directories that settings name."""

from relax_bridge import Checkpoint, ModelMap, adapt_mtp, model_map

from relax_core.assets import locate
from relax_core.config.root import RelaxConfig
from relax_core.model.config import Qwen35Config


def open_checkpoint(path: str, *, weights: bool = True) -> Checkpoint:
    """A Hugging Face directory named by a setting.

    Raises:
        ValueError: there is none, or its files are broken.
    """
    directory = locate(path)
    if not directory.is_dir():
        raise ValueError(
            f"model.path is {path!r}: no such directory. Give a Hugging Face directory with config.json, "
            "safetensors and tokenizer; nothing is downloaded"
        )
    return Checkpoint.open(directory, weights=weights)


def open_model(config: RelaxConfig) -> tuple[Checkpoint, ModelMap]:
    """The checkpoint to start from, with the draft layers that `config.mtp` asks for, and its weight map.

    Raises:
        ValueError: there is none, or it cannot have such draft layers.
    """
    source = open_checkpoint(config.model.path, weights=not config.model.random_weights)
    std = Qwen35Config.from_hf(source.config).init_std
    weights = model_map(
        source.config,
        names=source.names or None,
        mtp_layers=config.mtp.layers,
        vision=config.model.vision != "absent",
    )
    return adapt_mtp(source, weights, init=config.mtp.init, std=std, seed=config.run.seed), weights
