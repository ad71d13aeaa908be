"""The rows in flight with their cache: prefill, one step, drop, merge.

N rows, P distinct prompts, T prompt width, S slots used, V vocabulary. Rows are left-padded to the widest.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from relax_rollout.engine import EngineError
from relax_rollout.engines.transformers.cache import BatchCache
from relax_rollout.engines.transformers.pictures import embed, positions_3PT
from relax_rollout.engines.transformers.row import Row
from relax_rollout.pictures import next_position
from relax_rollout.sampling import SamplingTensors, draw
from relax_rollout.seeds import uniforms

MAX_ROOM = 256
"""Slots allocated ahead at once; a longer completion makes room again when it gets there."""


class Batch:
    """Rows whose next token can be drawn: the logits of each row's last token are known.

    Build with :meth:`prefill`. Rows that have ended stay until :meth:`keep_live`; they are carried along
    unread.

    Attributes:
        position_N: of the next token; pictures take fewer positions than they have tokens.
    """

    def __init__(
        self, rows: list[Row], cache: BatchCache, logits_NV: Tensor, length_N: Tensor, position_N: Tensor
    ) -> None:
        self.rows = rows
        self.cache = cache
        self.logits_NV = logits_NV
        self.length_N = length_N
        self.position_N = position_N
        self._settings = self._read_settings()

    def _read_settings(self) -> SamplingTensors:
        params = [row.request.sampling for row in self.rows]
        device = self.logits_NV.device
        return SamplingTensors(
            temperature_N=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            top_p_N=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
            top_k_N=torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
        )

    @classmethod
    def prefill(
        cls, model: PreTrainedModel, layer_types: tuple[str, ...], rows: Sequence[Row], *, max_tokens: int
    ) -> "Batch":
        """Run every distinct context once, in forward calls of at most ``max_tokens`` padded tokens each."""
        members: dict[Any, list[Row]] = {}
        for row in rows:
            members.setdefault(row.prefill_key, []).append(row)
        groups = sorted(members.values(), key=lambda group: len(group[0].context))
        batch: Batch | None = None
        while groups:
            count = 1
            while count < len(groups) and (count + 1) * len(groups[count][0].context) <= max_tokens:
                count += 1
            part = cls._prefill_part(model, layer_types, groups[:count])
            groups = groups[count:]
            if batch is None:
                batch = part
            else:
                batch.merge(part)
        assert batch is not None, "prefill needs at least one row"
        return batch

    @classmethod
    def _prefill_part(
        cls, model: PreTrainedModel, layer_types: tuple[str, ...], groups: Sequence[list[Row]]
    ) -> "Batch":
        """Each group's rows have one context."""
        device = model.device
        contexts = [group[0].context for group in groups]
        lengths = [len(context) for context in contexts]
        width = max(lengths)
        ids_PT = np.zeros((len(groups), width), dtype=np.int64)
        for line, context in zip(ids_PT, contexts, strict=True):
            line[width - len(context) :] = context
        length_P = torch.tensor(lengths, device=device)
        slot_T = torch.arange(width, device=device)
        position_PT = slot_T - (width - length_P)[:, None]
        cache = BatchCache(layer_types)
        input_ids = torch.from_numpy(ids_PT).to(device)
        inputs: Mapping[str, Tensor] = {"input_ids": input_ids, "position_ids": position_PT.clamp(min=0)}
        pictures = [group[0].request.pictures for group in groups]
        if any(pictures):
            inputs = {
                "inputs_embeds": embed(model, input_ids, lengths, pictures),
                "position_ids": positions_3PT(width, lengths, pictures, device),
            }
        logits_P1V = model(
            **inputs,
            attention_mask=None if min(lengths) == width else (position_PT >= 0).long(),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        rows = [row for group in groups for row in group]
        index_N = torch.tensor([place for place, group in enumerate(groups) for _ in group], device=device)
        next_P = torch.tensor(
            [next_position(length, of_row) for length, of_row in zip(lengths, pictures, strict=True)],
            device=device,
        )
        cache.select(index_N, drop=0, room=min(MAX_ROOM, max(row.remaining for row in rows)))
        return cls(
            rows, cache, *(of_P.index_select(0, index_N) for of_P in (logits_P1V[:, 0], length_P, next_P))
        )

    @property
    def live(self) -> int:
        """Rows that have not ended."""
        return sum(row.finish is None for row in self.rows)

    def draw(self, version: int) -> Tensor:
        """Draw the next token of every row and give it to the rows that have not ended.

        Returns:
            token_N int64.

        Raises:
            EngineError: the logits of a row are not finite.
        """
        drawn_at = [len(row.tokens) for row in self.rows]
        uniform_N = torch.from_numpy(uniforms([row.seed for row in self.rows], drawn_at))
        token_N, logprob_N = draw(self.logits_NV, self._settings, uniform_N.to(self.logits_NV.device))
        logprobs: list[float] = logprob_N.tolist()
        if not bool(torch.isfinite(logprob_N).all()):
            bad = next(row for row, value in zip(self.rows, logprobs, strict=True) if not np.isfinite(value))
            raise EngineError(
                f"the logits of request {bad.request.id!r} after {len(bad.tokens)} tokens are not finite "
                f"under weights version {version}: the weights have overflowed or an update broke them"
            )
        for place, (row, token, logprob) in enumerate(
            zip(self.rows, token_N.tolist(), logprobs, strict=True)
        ):
            if row.finish is None:
                self._note_others(place, row)
                row.append(token, logprob, version)
        return token_N

    def _note_others(self, place: int, row: Row) -> None:
        """Log-probs of tokens that were not drawn, if the row's request asks for them."""
        top, ids = row.request.top_logprobs, row.request.logprob_ids
        if not top and not ids:
            return
        logits_V = self.logits_NV[place].float() / (row.request.sampling.temperature or 1.0)
        logprob_V = logits_V.log_softmax(-1)
        if top:
            best = logprob_V.topk(top)
            row.top_logprobs.append(tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
        if ids:
            row.id_logprobs.append(tuple(logprob_V[list(ids)].tolist()))

    def advance(self, model: PreTrainedModel, token_N: Tensor) -> None:
        """Run the drawn tokens through the model."""
        width = self.cache.get_seq_length() + 1
        pad_N = width - 1 - self.length_N
        mask_N11S = None
        if bool((pad_N > 0).any()):
            mask_N11S = (torch.arange(width, device=token_N.device) >= pad_N[:, None])[:, None, None, :]
        self.logits_NV = model(
            input_ids=token_N[:, None],
            attention_mask=mask_N11S,
            position_ids=self.position_N[:, None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, 0]
        self.length_N = self.length_N + 1
        self.position_N = self.position_N + 1

    def keep_live(self, token_N: Tensor) -> Tensor:
        """Drop the rows that have ended, and the slots that only they used; the tokens of those that stay."""
        device = self.logits_NV.device
        kept = [place for place, row in enumerate(self.rows) if row.finish is None]
        index_N = torch.tensor(kept, dtype=torch.int64, device=device)
        self.rows = [self.rows[place] for place in kept]
        self.length_N = self.length_N.index_select(0, index_N)
        self.position_N = self.position_N.index_select(0, index_N)
        width = self.cache.get_seq_length()
        room = min(MAX_ROOM, max(row.remaining for row in self.rows))
        self.cache.select(index_N, drop=width - int(self.length_N.max()), room=room)
        self.logits_NV = self.logits_NV.index_select(0, index_N)
        self._settings = self._read_settings()
        return token_N.index_select(0, index_N)

    def merge(self, other: "Batch") -> None:
        """Take over the rows of another batch."""
        self.cache.merge(other.cache)
        self.rows = self.rows + other.rows
        self.logits_NV = torch.cat([self.logits_NV, other.logits_NV])
        self.length_N = torch.cat([self.length_N, other.length_N])
        self.position_N = torch.cat([self.position_N, other.position_N])
        self._settings = self._read_settings()
