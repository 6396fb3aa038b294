"""The declaration of a family of models: the facts that its tokenizer and template do not tell.

Each file of `models/families` has one, `FAMILY`. `models/adapters` reads the words,
`models/checkpoint` the settings, and `execution/spec` the facts about mlx-lm's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_manager.mlx_server.formats import Region
from mlx_manager.mlx_server.models.module_facts import ModuleFacts

Marks = tuple[str, str]
"""The texts before and after thinking."""


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of answers that are ordinary text, not special tokens.

    thinking: around thinking. content: around the text that the caller reads; the last ones may
    end it in either form. asked_by: the template's variable that asks for thinking; "" if all
    answers have the tags.
    """

    thinking: Marks
    content: tuple[str, ...]
    asked_by: str = ""


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """Form of answers that consist of messages, each with a header.

    header, channels, thinking_end: as in `OutputFormat`. ends: texts that end a message, after
    which a header follows. begun: a regular expression for a header at the end of a prompt; its
    first group is the channel.
    """

    header: str
    channels: Mapping[str, Region]
    ends: tuple[str, ...]
    begun: str
    thinking_end: str

    @property
    def edges(self) -> Mapping[Region, tuple[tuple[str, Region], ...]]:
        """The markers of each region, as in `OutputFormat`."""
        ends: tuple[tuple[str, Region], ...] = tuple((end, "header") for end in self.ends)
        return {"content": ends, "reasoning": ends}


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """Special tokens of an infilling prompt, in front of its parts.

    prefix: before the text's beginning. suffix: before the text's end. middle: before the text that
    is to be written. suffix_first: the end comes before the beginning.
    """

    prefix: str
    suffix: str
    middle: str | None
    suffix_first: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.prefix, self.suffix, self.middle) if name)


@dataclass(frozen=True, slots=True)
class VisionFacts:
    """Checkpoints of a family that see pictures.

    kinds: their `model_type`s. tower: the name of their tower in `vision/towers`. tensors:
    beginnings of the names of the tower's and the projector's tensors, in all published forms.
    placeholder: the token that stands for a picture in a template's text. written: all that the
    family's own templates write for a picture, the placeholder among it. tokens: the tokens that
    may stand in and around a picture, and those of other media; in users' texts they are plain
    text. encoder: the
    `model_type` of their `vision_config`, if other checkpoints of these kinds have another.
    language: True if mlx-lm has no class for these kinds, or one that does not know transformers'
    names of tensors: the language model is built from `text_config` alone.
    """

    kinds: tuple[str, ...]
    tower: str
    tensors: tuple[str, ...]
    placeholder: str
    written: str
    tokens: tuple[str, ...]
    encoder: str = ""
    language: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """Return all tokens that users' texts can't hold as tokens."""
        return (self.placeholder, *self.tokens)


@dataclass(frozen=True, slots=True)
class MTPFacts:
    """Checkpoints of a family that have a head for multi-token prediction (MTP).

    kinds: their `model_type`s. layer: True if the head is stored as the layer behind the last one;
    False if its tensors' names begin with `mtp.`. config: settings of a model of one layer, which
    is the head's; None removes a setting. absent: attributes of such a model's body that would
    number a layer of a kind that the head lacks. blank_first: True if the head does not see the
    token at place 0. centred: True if transformers' checkpoints store the weights of norms less
    one.
    """

    kinds: tuple[str, ...]
    layer: bool
    config: Mapping[str, Any]
    absent: tuple[str, ...] = ()
    blank_first: bool = False
    centred: bool = False


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    """Facts about a family's config.json, by `model_type`.

    periods: the setting of the number of layers of which the last has full attention.
    layer_types: mlx-lm's names for transformers' types of layer. names: transformers 5's names of
    settings, by mlx-lm's. rope_by_layer: the `model_type`s
    whose classes read `rope_parameters` by type of layer. extended: beginnings of the
    `model_type`s whose `max_position_embeddings` counts the extension by `rope_scaling`.
    """

    periods: Mapping[str, str] = field(default_factory=dict)
    layer_types: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    rope_by_layer: tuple[str, ...] = ()
    extended: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    name: shown to clients. named: a regular expression that is found in the `model_type`s and
    names of its models, in lower case.
    turn_ends: tokens that end an answer, besides those that the checkpoint and its template name.
    thinking, content: special tokens around thinking, and around the text that the caller reads,
    that mlx-lm does not know. Any model whose vocabulary has them has these marks.
    tags, messages: see these classes; None for most families.
    tool_format: the name of the format of calls, if the family's templates do not tell it.
    infill: tokens for infilling, in any model whose vocabulary has all of them.
    function_variables: the variables that mlx-lm's function in place of a template knows.
    shown: changes a message in the template's form to one that the template takes.
    vision: its checkpoints that see. mtp: those with a head for multi-token prediction.
    config, modules: facts about config.json and about mlx-lm's modules.
    """

    name: str
    named: str
    turn_ends: tuple[str, ...] = ()
    thinking: tuple[Marks, ...] = ()
    content: tuple[tuple[str, ...], ...] = ()
    tags: Tags | None = None
    messages: MessageFormat | None = None
    tool_format: str = ""
    infill: tuple[InfillTokens, ...] = ()
    function_variables: frozenset[str] | None = None
    shown: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    vision: tuple[VisionFacts, ...] = ()
    mtp: tuple[MTPFacts, ...] = ()
    config: ConfigFacts = field(default_factory=ConfigFacts)
    modules: ModuleFacts = field(default_factory=ModuleFacts)
