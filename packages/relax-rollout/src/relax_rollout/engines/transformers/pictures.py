"""Prompts with pictures: embeddings in which what the tower sees stands at the pictures' places.

P distinct prompts, T prompt width, D hidden, F numbers of a patch, S patches of all pictures. Rows are
left-padded to the widest.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from relax_rollout.pictures import PlacedPicture, multi_positions


def patch_of(model: PreTrainedModel) -> tuple[int, int]:
    """Numbers of a patch, and patches along one side of a token, as the model's tower takes them."""
    vision = model.config.vision_config
    numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return int(numbers), int(vision.spatial_merge_size)


def embed(
    model: PreTrainedModel,
    ids_PT: Tensor,
    lengths: Sequence[int],
    pictures: Sequence[Sequence[PlacedPicture]],
) -> Tensor:
    """[P, T, D]: the tokens' embeddings, and at the places of pictures what the tower makes of these.

    Places are taken as the prompts give them: a token that stands for pictures and was drawn by the model is
    a token like any other, here as in training. A picture of several prompts goes through the tower once.
    """
    embedded_PTD: Tensor = model.get_input_embeddings()(ids_PT)
    distinct = {id(one.picture): one.picture for of_row in pictures for one in of_row}
    if not distinct:
        return embedded_PTD
    patches_SF = torch.from_numpy(np.concatenate([picture.patches() for picture in distinct.values()]))
    grids = torch.tensor([picture.grid for picture in distinct.values()], device=ids_PT.device)
    features = model.model.get_image_features(
        patches_SF.to(ids_PT.device), grids, return_dict=True
    ).pooler_output
    seen = dict(zip(distinct, features, strict=True))
    width = ids_PT.shape[1]
    for row, (length, of_row) in enumerate(zip(lengths, pictures, strict=True)):
        for one in of_row:
            first = width - length + one.start
            embedded_PTD[row, first : first + one.picture.tokens] = seen[id(one.picture)].to(
                embedded_PTD.dtype
            )
    return embedded_PTD


def positions_3PT(
    width: int, lengths: Sequence[int], pictures: Sequence[Sequence[PlacedPicture]], device: torch.device
) -> Tensor:
    """int64 frame, row and column position of every token; 0 where a row is padded."""
    found = np.zeros((3, len(lengths), width), dtype=np.int64)
    for row, (length, of_row) in enumerate(zip(lengths, pictures, strict=True)):
        found[:, row, width - length :] = multi_positions(length, of_row)
    return torch.from_numpy(found).to(device)
