"""`Qwen35Model`: embedding, trunk, output head and draft layers of Qwen3.5 on Megatron.

Axes: T packed positions, 1 (Megatron's batch axis), S scored positions, D hidden, V vocabulary, M tokens of
all pictures of a row.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlock, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from relax_kernels import LogProbs

from relax_core.model.arriving import all_arrived, arrived
from relax_core.model.balance import LoadBalance
from relax_core.model.config import Qwen35Config
from relax_core.model.head import score_tokens
from relax_core.model.linear import without_adapters
from relax_core.model.mtp import MultiTokenPrediction
from relax_core.model.mtp_config import MtpConfig
from relax_core.model.packed import PackedContext
from relax_core.model.spec import trunk_spec
from relax_core.model.vision.link import FeatureLink
from relax_core.model.vision.tower import VisionTower
from relax_core.packing import PackedLayout
from relax_core.packing.pictures import RowPictures


class Qwen35Model(LanguageModule):  # type: ignore[misc]
    """A Qwen3.5 text model, or one pipeline stage of it; build it with `build_model`.

    Args:
        config: Megatron's config.
        model: sizes.
        mtp: what the draft layers' gradient may reach.
        pre_process: whether this stage embeds tokens.
        post_process: whether this stage ends in hidden states for the head.
        vp_stage: virtual pipeline stage, or None.
    """

    def __init__(
        self,
        config: TransformerConfig,
        model: Qwen35Config,
        *,
        mtp: MtpConfig,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ) -> None:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        super().__init__(config=config, pg_collection=groups)
        self.model_type = ModelType.encoder_or_decoder
        self.model_config = model
        self.mtp_config = mtp
        self.pre_process = pre_process
        self.post_process = post_process
        self.vp_stage = vp_stage
        self.share_embeddings_and_output_weights = model.tied
        if mtp.repeated > 1 and model.mtp_layers != 1:
            raise ValueError(
                f"mtp.repeated is {mtp.repeated} and the model has {model.mtp_layers} draft layers: only a "
                "single one is applied again and again; set mtp.repeated to 1"
            )
        self.mtp_process = post_process and model.mtp_layers > 0
        if pre_process or self.mtp_process:
            self.embedding = LanguageModelEmbedding(
                config, model.vocab_size, max_sequence_length=0, position_embedding_type="rope"
            )
        self.visual: VisionTower | None = None
        if pre_process and model.vision is not None:
            self.visual = VisionTower(config, model.vision)
        offset = get_transformer_layer_offset(config, vp_stage)
        layers = range(offset, offset + get_num_layers_to_build(config, vp_stage))
        self.decoder = TransformerBlock(
            config,
            trunk_spec(model, layers),
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        if post_process:
            self.output_layer = self.make_head()
        # Draft layers look ahead onto pictures that the first stage saw.
        apart = pre_process != post_process and model.vision is not None and model.mtp_layers > 0
        self._features = FeatureLink() if apart else None
        # Megatron's schedules take any attribute called mtp for a block with layers.
        if self.mtp_process:
            self.mtp = MultiTokenPrediction(
                config if config.lora is not None and config.lora.drafts else without_adapters(config),
                model,
                groups,
                vp_stage,
            )
        if pre_process or post_process:
            self.setup_embeddings_and_output_layer()

    def make_head(self) -> Any:
        """The module of the output head, on the last stage."""
        model = self.model_config
        return ColumnParallelLinear(
            model.hidden_size,
            model.vocab_size,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            skip_weight_param_allocation=model.tied and (self.pre_process or self.mtp_process),
            tp_group=self.pg_collection.tp,
        )

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """The copy of the embedding that this stage holds and Megatron keeps equal to the first stage's.

        With draft layers the last stage embeds tokens, so that its copy is an embedding, tied head or not.
        """
        if self.pre_process or self.mtp_process:
            return cast(torch.Tensor, self.embedding.word_embeddings.weight)
        return cast(torch.Tensor, self.output_layer.weight) if self.post_process else None

    @property
    def depths(self) -> int:
        """Draft depths of the whole model, on whichever stage."""
        return self.model_config.mtp_layers * self.mtp_config.repeated

    @property
    def mtp_depths(self) -> int:
        """Draft depths on this stage."""
        return self.depths if self.mtp_process else 0

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor]) -> None:
        """Takes the hidden states of the stage before (called by Megatron's schedules)."""
        if isinstance(input_tensor, list):
            (input_tensor,) = input_tensor
        self.decoder.set_input_tensor(input_tensor)

    def forward(
        self,
        tokens_T: torch.Tensor,
        layout: PackedLayout,
        *,
        balance: LoadBalance | None = None,
        pictures: RowPictures | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, D] of packed tokens, after the final norm.

        A pipeline stage before the last returns what the next one takes, [T, 1, D] (this rank's tokens under
        sequence parallelism).

        Args:
            tokens_T: int64 token ids of all samples, back to back; padding holds any valid id.
            layout: where the samples lie.
            balance: of this optimizer step, in a model with experts: their use is counted, and the gradient
                of its loss is added to that of the hidden states.
            pictures: of the whole row, None if it has none; the tower is run on them.

        Raises:
            ValueError: there are pictures and the model has no tower.
        """
        if pictures is not None and self.model_config.vision is None:
            raise ValueError("the samples have pictures, and the model was built without its vision tower")
        hidden_T1D = None
        if self.pre_process:
            hidden_T1D = self._see(self._embed(tokens_T), layout, pictures)
        hidden_T1D = self.decoder(
            hidden_states=hidden_T1D,
            attention_mask=None,
            packed_seq_params=self._context(layout, tokens_T.device, balance, pictures),
        )
        if not self.post_process:
            return cast(torch.Tensor, hidden_T1D)
        return self._gathered(hidden_T1D)

    def mtp_hidden(
        self,
        hidden_TD: torch.Tensor,
        ahead_T: Sequence[torch.Tensor],
        layout: PackedLayout,
        *,
        balance: LoadBalance | None = None,
        pictures: RowPictures | None = None,
    ) -> list[torch.Tensor]:
        """Hidden states [T, D] of every draft depth; depth k predicts the token k + 2 places ahead.

        What enters is cut from the trunk and from the embedding as `MtpConfig` says. Where a sample has no
        token k + 1 places ahead, the result has no meaning (token 0 stands in), but no other position sees
        it.

        Args:
            hidden_TD: the trunk's, from `forward`.
            ahead_T: int64 [T] for each depth k, the token k + 1 places ahead in the same sample, any token
                where there is none: `layout.shift(tokens_T, k + 1)` where the rank has the whole row.
            layout: the same layout.
            balance: the same.
            pictures: the same, after `forward`: a picture's token ahead is seen as the trunk saw it.
        """
        if not self.mtp_process:
            return []
        embeddings = [self._embed(tokens_T) for tokens_T in ahead_T]
        if pictures is not None:
            if pictures.seen_MD is None:
                assert self._features is not None, "the trunk's pass comes first"
                pictures.seen_MD = self._features.receive(
                    pictures.tokens,
                    self.model_config.hidden_size,
                    dtype=self.config.params_dtype,
                    device=hidden_TD.device,
                )
            embeddings = [
                self._place(embedding_T1D, layout, pictures, ahead)
                for ahead, embedding_T1D in enumerate(embeddings, start=1)
            ]
        if self.mtp_config.detach_embedding:
            embeddings = [embedding_T1D.detach() for embedding_T1D in embeddings]
        if self.mtp_config.detach_trunk:
            hidden_TD = hidden_TD.detach()
        hidden_T1D = hidden_TD.unsqueeze(1)
        if self.config.sequence_parallel:
            hidden_T1D = scatter_to_sequence_parallel_region(hidden_T1D, group=self.tp_group)
        context = self._context(layout, hidden_TD.device, balance, pictures)
        hidden = self.mtp(embeddings, hidden_T1D, context)
        return [self._gathered(hidden_T1D) for hidden_T1D in hidden]

    def token_logprobs(
        self,
        hidden_SD: torch.Tensor,
        target_S: torch.Tensor,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        all_targets: bool = False,
        detach_head: bool = False,
    ) -> LogProbs:
        """Log-probs of target tokens; the logits of all positions never exist at once.

        Args:
            hidden_SD: hidden states at any S positions, of the trunk or of a draft depth.
            target_S: int64 token ids, -1 for none (log-prob 0, no gradient).
            temperature: divides the logits.
            with_entropy: also the entropy of each distribution.
            all_targets: no target is -1, which saves a wait for the device.
            detach_head: keep the gradient out of the head's weight.
        """
        weight_VD = self.head_weight()
        return score_tokens(
            hidden_SD,
            weight_VD.detach() if detach_head else weight_VD,
            target_S,
            temperature=temperature,
            with_entropy=with_entropy,
            all_targets=all_targets,
            group=self.tp_group,
        )

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] of this rank's vocabulary rows; for tests and small batches."""
        return hidden_SD @ self.head_weight().T

    def head_weight(self) -> torch.Tensor:
        """The output head's rows on this rank [V, D]: the embedding's when tied.

        Raises:
            RuntimeError: this pipeline stage has no head.
        """
        if not self.post_process:
            raise RuntimeError("only the last pipeline stage has the output head")
        weight = arrived(self.output_layer).weight
        if weight is None:
            weight = arrived(self.embedding.word_embeddings).weight
        return cast(torch.Tensor, weight)

    def _gathered(self, hidden_T1D: torch.Tensor) -> torch.Tensor:
        """[T, 1, D] -> [T, D], all tokens of the row on every tensor-parallel rank."""
        if self.config.sequence_parallel:
            # The head completes its gradient on every rank, so that each takes its own tokens' part of it.
            hidden_T1D = gather_from_sequence_parallel_region(
                hidden_T1D, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return hidden_T1D.squeeze(1)

    def _embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, 1, D] (this rank's tokens under sequence parallelism)."""
        embedded_T1D = cast(torch.Tensor, self.embedding(tokens_T.unsqueeze(0), None))
        if self.config.lora is not None and torch.is_grad_enabled():
            # Megatron's recompute gives no gradient at all where no input asks for one.
            embedded_T1D.requires_grad_()
        return embedded_T1D

    def _see(
        self, hidden_T1D: torch.Tensor, layout: PackedLayout, pictures: RowPictures | None
    ) -> torch.Tensor:
        """Embeddings with what the tower sees in the place of picture tokens."""
        if self.visual is None:
            return hidden_T1D
        if pictures is None:
            learns = self.visual.trained and torch.is_grad_enabled()
            return hidden_T1D + self.visual.nothing() if learns else hidden_T1D
        with torch.set_grad_enabled(self.visual.trained and torch.is_grad_enabled()):
            pictures.seen_MD = self.visual(pictures.patches_PF, pictures.grids)
        if self._features is not None and pictures.for_drafts:
            self._features.send(pictures.seen_MD)
        return self._place(hidden_T1D, layout, pictures, 0)

    def _place(
        self, hidden_T1D: torch.Tensor, layout: PackedLayout, pictures: RowPictures, ahead: int
    ) -> torch.Tensor:
        """What the tower saw, put where the token `ahead` places on is a picture's."""
        assert pictures.seen_MD is not None, "the trunk's pass comes first"
        piece = (self.tp_group.rank(), self.tp_group.size()) if self.config.sequence_parallel else (0, 1)
        places, tokens = pictures.placed(layout, ahead, hidden_T1D.device, piece=piece)
        seen_M1D = pictures.seen_MD[tokens].unsqueeze(1).to(hidden_T1D.dtype)
        return hidden_T1D.index_copy(0, places, seen_M1D)

    def _context(
        self,
        layout: PackedLayout,
        device: torch.device,
        balance: LoadBalance | None,
        pictures: RowPictures | None,
    ) -> PackedContext:
        model = self.model_config
        spread = self.tp_group if self.config.sequence_parallel else None
        return PackedContext.build(
            layout,
            device=device,
            rotary_dim=model.rotary_dim,
            rope_base=model.rope_base,
            routing=balance.begin(layout, spread) if balance and model.experts else None,
            positions_3T=None if pictures is None else pictures.positions_3T,
            sections=model.rope_sections,
        )

    def _set_attention_backend(self) -> None:
        """Transformer Engine is not used, so its environment is left alone."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's sharded state; layers are keyed by their place in the whole model."""
        all_arrived(self)
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        embedding = f"{prefix}embedding.word_embeddings.weight"
        if embedding in state and not self.pre_process:
            # The copy that the draft layers read is the first stage's to write.
            state[embedding].replica_id = (1, *state[embedding].replica_id[1:])
        return {key: value for key, value in state.items() if not key.endswith("_extra_state")}
