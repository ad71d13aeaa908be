"""Settings of the data: where rows come from, how they become tokens, and what happens to bad ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from relax_core.config.section import Section, SettingError, refuse, setting


class DataConfig(Section):
    """Which rows are trained on, and which are held out."""

    path: str = setting(
        ...,
        "Rows to train on: a .jsonl or .parquet file, a folder or glob pattern of them, or the name of a "
        "Hugging Face data set such as openai/gsm8k.",
        min_length=1,
    )
    mixture: dict[str, Annotated[float, Field(gt=0, le=1e6)]] = setting(
        {},
        "Further rows to train on, given as path is, and how many are drawn of each for one of path; each "
        "source is drawn in its own order, and eval_fraction and limit are of each.",
    )
    eval_path: str | None = setting(
        None, "Held-out rows, given as path is; null takes eval_fraction.", min_length=1
    )
    eval_fraction: float = setting(
        0.0,
        "Share of the prompts of path that is held out; equal prompts stay on one side.",
        ge=0,
        lt=1,
    )
    limit: int | None = setting(
        None, "Uses the first rows of path only; null takes all.", unit="rows", ge=1, lt=2**63
    )
    prompt_key: str | None = setting(
        "prompt", "Key of a row's prompt: text, or a list of messages; null if rows have none.", min_length=1
    )
    messages_key: str | None = setting(
        "messages",
        "Key of a row's conversation: a list of {role, content}; null if rows have none.",
        min_length=1,
    )
    completion_key: str | None = setting(
        "completion",
        "Key of the completion to learn, beside a prompt (sft); null if rows have none.",
        min_length=1,
    )
    text_key: str | None = setting(
        None,
        "Key of a row's document for continued pre-training (sft): bare text, all of whose tokens are "
        "learnt; no other key is read then. null reads prompts and conversations.",
        min_length=1,
    )
    end_of_text: str | None = setting(
        None,
        "Special token that stands between documents (text_key); null takes the tokenizer's eos_token.",
        min_length=1,
    )
    block_tokens: int = setting(
        4096, "Length of the blocks that documents (text_key) are cut into.", unit="tokens", ge=2, lt=2**31
    )
    documents: Literal["joined", "apart"] = setting(
        "joined",
        "Whether a document (text_key) sees those before it in its block (joined), or blocks hold one "
        "document each and it sees itself alone (apart).",
    )
    chosen_key: str = setting("chosen", "Key of the better completion of a pair (dpo).", min_length=1)
    rejected_key: str = setting("rejected", "Key of the worse completion of a pair (dpo).", min_length=1)
    answer_key: str | None = setting(
        "answer", "Key of the answer that the reward compares with; null if rows have none.", min_length=1
    )
    tools_key: str | None = setting(
        "tools", "Key of the tool descriptions for the chat template; null ignores them.", min_length=1
    )
    images_key: str | None = setting(
        None,
        "Key of a row's pictures: a list of paths or bytes, in the order of <image> and of image parts in "
        "its messages; null reads none.",
        min_length=1,
    )
    images_root: Path | None = setting(
        None, "Folder that paths of pictures start from; null takes the folder of each row's file."
    )
    image_max_mib: float = setting(32.0, "Largest file of a picture.", unit="MiB", gt=0, le=4096)
    image_max_pixels: int = setting(
        67_108_864, "Largest picture before the model's processor resizes it.", unit="pixels", ge=1, lt=2**40
    )
    image_cache: Path | None = setting(
        None,
        "Folder that keeps processed pictures for further runs; null takes one of this run's own, which is "
        "removed at its end.",
    )
    thinking: Literal["keep", "drop"] = setting(
        "keep",
        "What the assistant thought before an answer, <think>...</think> or reasoning_content (sft): given "
        "to the chat template as it is (keep), or left out (drop).",
    )
    metadata_keys: tuple[str, ...] = setting((), "Further keys of a row, handed to the reward function.")
    hub_subset: str | None = setting(
        None, "Subset (configuration) of path, if that is a Hugging Face data set."
    )
    hub_split: str = setting("train", "Split of path, if that is a Hugging Face data set.", min_length=1)
    hub_eval_split: str = setting(
        "test", "Split of eval_path if that is a Hugging Face data set.", min_length=1
    )
    hub_revision: str | None = setting(
        None, "Commit or tag of path, if that is a Hugging Face data set; null takes its newest."
    )
    chat: bool = setting(
        True, "Renders prompts through the tokenizer's chat template; false takes text as it is."
    )
    chat_template: Path | None = setting(
        None, "Jinja file that takes the place of the tokenizer's own chat template."
    )
    template_args: dict[str, bool | int | float | str] = setting(
        {}, "Arguments of the chat template, for instance {enable_thinking: false}."
    )
    system_prompt: str | None = setting(
        None, "Put before conversations that have no system message of their own."
    )
    shuffle: bool = setting(True, "Draws rows in a new random order each epoch; false keeps the file's.")
    seed: int | None = setting(None, "Seed of order and split; null takes run.seed.", ge=0, lt=2**32)
    max_tokens: int | None = setting(
        None, "Longest prompt (rl) or sample (sft) accepted; null accepts all.", unit="tokens", ge=1
    )
    overlong: Literal["refuse", "skip", "truncate"] = setting(
        "refuse",
        "What happens above max_tokens: counts as a bad row (refuse), is left out (skip), or is cut "
        "(truncate: prompts keep their end, samples their beginning).",
    )
    max_bad_rows: int = setting(
        0, "Bad rows skipped, of path and of eval_path each, before the run is refused.", unit="rows", ge=0
    )
    workers: int = setting(
        0,
        "Processes that tokenise rows and process pictures side by side, with the same result; 0 does it in "
        "the run's own.",
        unit="processes",
        ge=0,
        le=256,
    )
    batches_ahead: int = setting(
        1,
        "Batches (sft) that a thread makes ready, pictures loaded, while the trainer has the one before; "
        "0 makes each when it is due.",
        unit="batches",
        ge=0,
        le=64,
    )
    rewritten_history: Literal["refuse", "split"] = setting(
        "refuse",
        "Conversations whose earlier turns the chat template renders differently later on (sft): a bad row "
        "(refuse), or one sample for each assistant turn (split).",
    )

    @property
    def longest(self) -> tuple[str, int | None]:
        """The setting that bounds a prompt or sample, and its tokens; None is no bound."""
        if self.text_key is not None:
            return "block_tokens", self.block_tokens
        return "max_tokens", self.max_tokens

    @model_validator(mode="after")
    def _combination_is_possible(self) -> Self:
        refuse([*self._contradictions(), *self._of_documents(), *self._of_chats()])
        return self

    def _wrong(self, field: str, message: str, *, allowed: str, nearest: Any) -> SettingError:
        return SettingError(field, message, given=getattr(self, field), allowed=allowed, nearest=nearest)

    def _needless(self, field: str, why: str) -> SettingError:
        default = type(self).model_fields[field].default
        message = f"{field} has no effect while {why}"
        return self._wrong(field, message, allowed="its default", nearest=default)

    def _contradictions(self) -> Iterator[SettingError]:
        if self.eval_path is not None and self.eval_fraction > 0:
            yield self._wrong(
                "eval_fraction",
                f"eval_path {self.eval_path!r} and eval_fraction {self.eval_fraction:g} both choose held-out "
                "rows: set eval_fraction to 0 or eval_path to null",
                allowed="0, or eval_path null",
                nearest=0,
            )
        if self.path in self.mixture:
            yield self._wrong(
                "mixture",
                f"mixture names {self.path!r}, which is path already: leave it out of mixture",
                allowed="other files than path",
                nearest={name: share for name, share in self.mixture.items() if name != self.path},
            )
        if self.prompt_key is None and self.messages_key is None:
            yield self._wrong(
                "prompt_key",
                "prompt_key and messages_key are both null: name the key that holds the prompt",
                allowed="a key of the rows, or messages_key",
                nearest=type(self).model_fields["prompt_key"].default,
            )
        if self.overlong != "refuse" and self.max_tokens is None:
            yield self._wrong(
                "overlong",
                f"overlong {self.overlong!r} has no effect while max_tokens is null: set max_tokens",
                allowed="refuse, or max_tokens",
                nearest="refuse",
            )

    def _of_chats(self) -> Iterator[SettingError]:
        if self.chat:
            return
        if self.images_key is not None:
            yield self._wrong(
                "images_key",
                "images_key is set while chat is false: pictures stand in conversations; set chat to true",
                allowed="null, or chat true",
                nearest=None,
            )
        for field in ("chat_template", "template_args", "system_prompt"):
            if getattr(self, field):
                yield self._needless(field, "chat is false: leave it unset or set chat to true")

    def _of_documents(self) -> list[SettingError]:
        """What documents leave no room for, and what is for documents alone."""
        needless: tuple[str, ...]
        if self.text_key is None:
            needless, reason = ("end_of_text", "block_tokens", "documents"), "text_key is null"
        else:
            needless = ("max_tokens", "images_key", "chat_template", "template_args", "system_prompt")
            reason = "text_key is set: documents go through no chat template and are cut into block_tokens"
        return [
            self._needless(field, f"{reason}; leave it unset")
            for field in needless
            if getattr(self, field) != type(self).model_fields[field].default
        ]
