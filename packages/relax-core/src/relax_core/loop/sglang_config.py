"""Settings of SGLang's servers: what they may take of a device, and how they run."""

from typing import Self

from pydantic import model_validator

from relax_core.config.section import Section, setting

_MANAGED = (
    "--model-path",
    "--tp-size",
    "--tensor-parallel-size",
    "--device",
    "--dtype",
    "--max-running-requests",
    "--mem-fraction-static",
    "--max-total-tokens",
    "--chunked-prefill-size",
    "--max-prefill-tokens",
    "--max-mamba-cache-size",
    "--cuda-graph-bs",
    "--disable-radix-cache",
    "--attention-backend",
    "--port",
    "--host",
)


class SglangSettings(Section):
    """Servers of the engine sglang (`rollout.engine: sglang`)."""

    tensor: int = setting(1, "Devices of one server.", unit="devices", ge=1)
    memory_fraction: float | None = setting(
        None, "Share of a device's memory for weights and caches; null lets SGLang choose.", gt=0, lt=1
    )
    max_tokens: int | None = setting(
        None, "Tokens that one server caches; null takes what the memory holds.", unit="tokens", ge=1
    )
    prefill_tokens: int | None = setting(
        None, "Tokens of prompts computed at once; null lets SGLang choose.", unit="tokens", ge=1
    )
    states: int | None = setting(
        None,
        "Recurrent states that one server keeps, of finished prompts too; null lets SGLang choose.",
        unit="sequences",
        ge=1,
    )
    graph_batches: tuple[int, ...] = setting(
        (), "Batch sizes for which a graph of the decoding step is recorded; () lets SGLang choose."
    )
    radix_cache: bool = setting(True, "Keeps the keys and values of prompts for later requests.")
    attention: str | None = setting(
        None, "SGLang's attention backend, for instance ascend; null lets SGLang choose.", min_length=1
    )
    arguments: tuple[str, ...] = setting(
        (), "Further arguments of SGLang's server, as on its command line; for experts."
    )

    @model_validator(mode="after")
    def _arguments_are_further_ones(self) -> Self:
        given = [word for word in self.arguments if word.partition("=")[0] in _MANAGED]
        if given:
            raise ValueError(
                f"arguments holds {', '.join(given)}, which other settings decide: use those of this section "
                "and of rollout"
            )
        return self

    @property
    def command_line(self) -> tuple[str, ...]:
        """What the server is started with beside what the engine decides."""
        pairs = {
            "--mem-fraction-static": self.memory_fraction,
            "--chunked-prefill-size": self.prefill_tokens,
            "--max-prefill-tokens": self.prefill_tokens,
            "--max-mamba-cache-size": self.states,
            "--attention-backend": self.attention,
        }
        words = [str(word) for name, value in pairs.items() if value is not None for word in (name, value)]
        if self.graph_batches:
            words += ["--cuda-graph-bs", *map(str, self.graph_batches)]
        if not self.radix_cache:
            words.append("--disable-radix-cache")
        return (*words, *self.arguments)
