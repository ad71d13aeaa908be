"""The whole configuration of a run: it only composes the sections of the components."""

from typing import Self

from pydantic import model_validator

from relax_core.algorithms.config import AlgorithmConfig
from relax_core.cluster.config import ClusterConfig
from relax_core.config.checks import cross_problems
from relax_core.config.section import Section, setting
from relax_core.data.config import DataConfig
from relax_core.device.parallel import ParallelConfig
from relax_core.loop.config import (
    CheckpointConfig,
    CriticConfig,
    EvalConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    TeacherConfig,
)
from relax_core.loop.environments.config import EnvironmentConfig
from relax_core.loop.sglang_config import SglangSettings
from relax_core.model.lora_config import LoraConfig
from relax_core.model.mtp_config import MtpConfig
from relax_core.model.settings import ModelSettings
from relax_core.run.alerts import AlertConfig
from relax_core.run.config import RunConfig
from relax_core.trainer.config import TrainerConfig


class RelaxConfig(Section):
    """One run of `relax-train`."""

    run: RunConfig = setting(RunConfig(), "The run itself.")
    model: ModelSettings = setting(ModelSettings(), "The checkpoint.")
    lora: LoraConfig = setting(LoraConfig(), "Low-rank adapters.")
    mtp: MtpConfig = setting(MtpConfig(), "The draft layers.")
    data: DataConfig = setting(..., "The data.")
    algorithm: AlgorithmConfig = setting(AlgorithmConfig(), "The algorithm.")
    cluster: ClusterConfig = setting(ClusterConfig(), "Processes and where they run.")
    parallel: ParallelConfig = setting(ParallelConfig(), "How the model is spread over trainer ranks.")
    trainer: TrainerConfig = setting(TrainerConfig(), "The weight update.")
    critic: CriticConfig = setting(CriticConfig(), "The critic.")
    teacher: TeacherConfig = setting(TeacherConfig(), "The teacher.")
    rollout: RolloutConfig = setting(RolloutConfig(), "Sampling.")
    environment: EnvironmentConfig = setting(EnvironmentConfig(), "What answers the model's turns.")
    sglang: SglangSettings = setting(SglangSettings(), "SGLang's servers.")
    reward: RewardConfig = setting(RewardConfig(), "Scoring.")
    eval: EvalConfig = setting(EvalConfig(), "Evaluation.")
    sft: SftConfig = setting(SftConfig(), "Supervised fine-tuning.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), "Checkpoints.")
    alerts: AlertConfig = setting(AlertConfig(), "When a run warns.")

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Self:
        problems = cross_problems({name: getattr(self, name) for name in type(self).model_fields})
        if problems:
            raise ValueError("\n".join(str(problem) for problem in problems))
        return self
