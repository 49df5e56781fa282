"""Prompts become token ids: cleaned as the reference pipeline cleans them, then the checkpoint's own tokenizer."""

import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from safelight.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

# The reference's \s (package regex) leaves \x1c to \x1f alone, but none get here: ftfy and html.unescape drop them.
_BLANKS = re.compile(r"\s+")
# transformers writes a number above this for "no limit".
_NO_LIMIT = 10**20
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Side = Literal["left", "right"]


def clean_prompt(text: str) -> str:
    """Repair encodings, resolve HTML entities and make every run of white space one blank.

    Reference: `prompt_clean` of diffusers' WanPipeline, with ftfy installed. Lone surrogates become U+FFFD, so that the
    result always encodes.
    """
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return _BLANKS.sub(" ", text).strip()


@dataclass(frozen=True, kw_only=True)
class TokenizedPrompt:
    """A prompt's token ids, padded at the end; the first `num_tokens` are the prompt's, its end token included.

    `num_cut` is how many tokens the prompt had beyond what fits; they are lost.
    """

    ids: tuple[int, ...]
    num_tokens: int
    num_cut: int

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The ids without padding."""
        return self.ids[: self.num_tokens]


class Tokenizer:
    """A checkpoint's tokenizer: gives the ids that transformers' AutoTokenizer gives for the same folder.

    It holds no state between calls. `pad_id` fills the tail; `model_max_length` is the longest input its files allow,
    None where they set no limit.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        *,
        pad_token: str,
        truncation_side: Side = "right",
        model_max_length: int | None = None,
    ) -> None:
        pad_id = backend.token_to_id(pad_token)
        assert pad_id is not None, f"the vocabulary has no {pad_token}"
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._truncation_side = truncation_side
        self._num_special: int = backend.num_special_tokens_to_add(False)
        self.pad_id: int = pad_id
        self.model_max_length = model_max_length

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read `tokenizer.json` and `tokenizer_config.json`. Raises CheckpointError that names the file at fault."""
        path = folder / "tokenizer.json"
        config_path = folder / "tokenizer_config.json"
        if not path.is_file():
            raise _missing(path)
        if not config_path.is_file():
            raise _missing(config_path)
        config = _read_config(config_path)
        backend = _read_backend(path)
        settings = _settings(backend, config, config_path)
        _add_tokens(backend, config)
        return cls(backend, **settings)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id: what the encoder's embedding must hold."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, max_length: int) -> TokenizedPrompt:
        """Tokenise a cleaned prompt to exactly `max_length` ids.

        A prompt that is too long loses tokens, but keeps the end token. The time is proportional to the text.
        """
        assert max_length >= self._num_special, f"{max_length} ids have no room for {self._num_special} special tokens"
        encoding = self._backend.encode(text, add_special_tokens=False)
        room = max_length - self._num_special
        num_cut = max(0, len(encoding.ids) - room)
        if num_cut:
            encoding.truncate(room, direction=self._truncation_side)
        ids = self._backend.post_process(encoding).ids
        return TokenizedPrompt(
            ids=(*ids, *[self.pad_id] * (max_length - len(ids))), num_tokens=len(ids), num_cut=num_cut
        )


def _missing(path: Path) -> CheckpointError:
    sentencepiece = path.with_name("spiece.model")
    if path.name == "tokenizer.json" and sentencepiece.is_file():
        return CheckpointError(
            f"{path} is missing. There is only {sentencepiece}, a SentencePiece model, which Safelight doesn't read; "
            f"convert it once with transformers: AutoTokenizer.from_pretrained({str(path.parent)!r})"
            f".save_pretrained({str(path.parent)!r})",
            file=str(path),
        )
    return CheckpointError(
        f"{path} is missing; a tokenizer folder needs tokenizer.json and tokenizer_config.json. Download it again",
        file=str(path),
    )


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}. Download it again", file=str(path)) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds {type(config).__name__}; it must hold an object", file=str(path))
    return config


def _read_backend(path: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for everything: missing, malformed, unknown parts
        raise CheckpointError(
            f"{path} can't be read as a tokenizer: {error}. Download it again, or update the package tokenizers "
            f"(found {tokenizers.__version__})",
            file=str(path),
        ) from error


def _settings(backend: "tokenizers.Tokenizer", config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Tokenizer's keywords. Raises CheckpointError that says everything wrong with the file at once."""
    problems: list[str] = []
    for name, tokens in _tokens(config).items():
        problems += [f"{name} holds {token!r}, which isn't a token" for token in tokens if _content(token) is None]
    padding, truncation = backend.padding or {}, backend.truncation or {}
    pad_token = config.get("pad_token") or padding.get("pad_token")
    if pad_token is None:
        problems.append("pad_token is missing; the text needs a token that fills its tail")
    padding_side = config.get("padding_side", padding.get("direction", "right"))
    if padding_side != "right":
        problems.append(f'padding_side is {padding_side!r}; text is padded at its end: "right"')
    truncation_side = config.get("truncation_side", truncation.get("direction", "right"))
    if truncation_side not in ("left", "right"):
        problems.append(f'truncation_side is {truncation_side!r}; it must be "left" or "right"')
    limit = config.get("model_max_length")
    if limit is not None and (type(limit) not in (int, float) or limit < 1):
        problems.append(f"model_max_length is {limit!r}; it must be a number of at least 1")
    if problems:
        raise CheckpointError(f"{path}: " + "; ".join(problems), file=str(path))
    return {
        "pad_token": _content(pad_token),
        "truncation_side": truncation_side,
        "model_max_length": None if limit is None or limit > _NO_LIMIT else int(limit),
    }


def _tokens(config: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The tokens that tokenizer_config.json adds, by the key that holds them, in the order in which they get ids."""

    def held(name: str) -> list[Any]:
        tokens = config.get(name) or []
        if isinstance(tokens, dict):
            # The decoder's keys are the ids; other objects name their tokens.
            is_by_id = all(key.isdecimal() for key in tokens)
            return [tokens[key] for key in (sorted(tokens, key=int) if is_by_id else tokens)]
        return tokens if isinstance(tokens, list) else [tokens]

    named = {name: [config[name]] for name in _NAMED_TOKENS if config.get(name) is not None}
    extra = "extra_special_tokens" if "extra_special_tokens" in config else "additional_special_tokens"
    return {"added_tokens_decoder": held("added_tokens_decoder"), **named, extra: held(extra)}


def _add_tokens(backend: "tokenizers.Tokenizer", config: Mapping[str, Any]) -> None:
    """Make the tokens of tokenizer_config.json whole: one that is typed in a prompt is that token, not its letters.

    As in transformers, `added_tokens_decoder` overrides tokenizer.json, which overrides what only has a name.
    """
    declared, *named = _tokens(config).values()
    present: set[str | None] = {token.content for token in backend.get_added_tokens_decoder().values()}
    present |= {_content(token) for token in declared}
    added = [_added(token) for token in declared]
    for token in (token for tokens in named for token in tokens):
        if _content(token) not in present:
            present.add(_content(token))
            added.append(_added(token))
    backend.add_tokens(added)


def _added(token: Any) -> "tokenizers.AddedToken":
    import tokenizers

    if isinstance(token, str):
        return tokenizers.AddedToken(token, special=True, normalized=False)
    names = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return tokenizers.AddedToken(token["content"], **{"special": True} | {n: token[n] for n in names if n in token})


def _content(token: Any) -> str | None:
    """A token's text: tokenizer_config.json holds it bare, or in an object with its properties."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
