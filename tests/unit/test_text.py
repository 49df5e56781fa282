"""Prompt cleaning and tokenising, alone and against diffusers and transformers."""

import dataclasses
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from safelight.errors import CheckpointError
from safelight.text import TokenizedPrompt, Tokenizer, clean_prompt

WORDS = ("<pad>", "</s>", "<unk>", "a", "b", "red", "blue", "circle", "moving", "right", "café", "&", ",", "猫", "🐱")
PAD, EOS, UNK = 0, 1, 2
ID = {word: number for number, word in enumerate(WORDS)}
DX_068 = ("a &amp; b", "a   b", "ａ", "猫", "🐱\u200d👤", "\u200b", "", " ", "\n")


def word_backend() -> tokenizers.Tokenizer:
    """Lower case, split at white space and punctuation, </s> at the end."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(ID), unk_token="<unk>"))
    backend.normalizer = tokenizers.normalizers.Lowercase()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.WhitespaceSplit(), tokenizers.pre_tokenizers.Punctuation()]
    )
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", EOS)]
    )
    return backend


def write_folder(folder: Path, backend: tokenizers.Tokenizer | None = None, **config: Any) -> Path:
    """A tokenizer folder as a checkpoint has it."""
    folder.mkdir(parents=True, exist_ok=True)
    (backend or word_backend()).save(str(folder / "tokenizer.json"))
    named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    full = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **config}
    text = json.dumps({key: value for key, value in full.items() if value is not None})
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(tmp_path / "tokenizer"))


# Cleaning


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("a &amp; b", "a & b"),
        ("a &amp;amp; b", "a & b"),
        ("a &lt;b&gt;", "a <b>"),
        ("a   b\t\nc", "a b c"),
        ("  a\u3000b\u00a0", "a b"),
        ("ａ", "a"),
        ("cafÃ©", "café"),
        ("“a” ‘b’", "\"a\" 'b'"),
        ("猫", "猫"),
        ("\ud83d", "\ufffd"),
        ("\n", ""),
        ("", ""),
    ],
)
def test_cleaning_repairs_unescapes_and_joins(text: str, cleaned: str) -> None:
    assert clean_prompt(text) == cleaned


def awkward_texts() -> list[str]:
    """Every kind of character and entity that one of the cleaning steps touches, in random company; seeded."""
    generator = random.Random(7)
    pieces = (
        *("a", "B", " ", "  ", "\t", "\n", "\r\n", "\x0b", "\x0c", "\x00", "\x07", "\x1b[31m", "\x85", "\xa0", "\xad"),
        *("&amp;", "&amp;amp;", "&amp;amp;amp;", "&lt;", "&nbsp;", "&#160;", "&#x1c;", "&#28;", "&#x2003;", "&#xD800;"),
        *("&eacute;", "&Eacute;", "&notin", "&", ";", "<b>", "\x1c", "\x1f", "\u1680", "\u2003", "\u2028", "\u202f"),
        *("\u205f", "\u3000", "\u200b", "\u200d", "\u2060", "\ufeff", "\ufffd", "Ã©", "â€™", "â€œ", "ï¬", "ﬁ", "ａ"),
        *("Ｂ", "…", "’", "“", "e\u0301", "é", "猫", "ｱ", "🐱\u200d👤", "👩🏽", "\ud800", "İ", "ß", "√", "Ð¿Ñ€Ð¸"),
    )
    return ["".join(generator.choices(pieces, k=generator.randint(0, 12))) for _ in range(3000)]


@pytest.mark.parity
def test_dx_068_cleaning_equals_the_reference() -> None:
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    every_blank = [f"a{chr(code)}b {chr(code)}" for code in range(0x3100)]
    for text in (*DX_068, *every_blank, *awkward_texts()):
        assert clean_prompt(text) == prompt_clean(text), repr(text)


# Tokenising


def test_ids_are_padded_and_end_with_the_end_token(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("A red circle, moving FAST", 10)

    words = (ID["a"], ID["red"], ID["circle"], ID[","], ID["moving"], UNK, EOS)
    assert prompt == TokenizedPrompt(ids=(*words, PAD, PAD, PAD), num_tokens=7, num_cut=0)
    assert prompt.prompt_ids == words
    assert tokenizer.pad_id == PAD
    assert tokenizer.vocab_size == len(WORDS)


def test_an_empty_prompt_is_the_end_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("", 3) == TokenizedPrompt(ids=(EOS, PAD, PAD), num_tokens=1, num_cut=0)


@pytest.mark.parametrize(("num_words", "num_cut"), [(6, 0), (7, 0), (8, 1), (9, 2), (100, 93)])
def test_cutting_keeps_the_end_token_and_counts(tokenizer: Tokenizer, num_words: int, num_cut: int) -> None:
    prompt = tokenizer.encode(" ".join(["red"] * num_words), 8)

    kept = min(num_words, 7)
    assert prompt.prompt_ids == (ID["red"],) * kept + (EOS,)
    assert (prompt.num_tokens, prompt.num_cut, len(prompt.ids)) == (kept + 1, num_cut, 8)


def test_room_for_nothing_but_the_end_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("red circle", 1) == TokenizedPrompt(ids=(EOS,), num_tokens=1, num_cut=2)


@pytest.mark.parametrize("max_length", [16, 512, 4096])
@pytest.mark.parametrize("num_words", [10, 77, 78, 512, 600, 100_000])
def test_dx_065_the_last_word_counts_exactly_if_it_fits(tokenizer: Tokenizer, num_words: int, max_length: int) -> None:
    start = time.perf_counter()
    same = ["a"] * (num_words - 1)
    red, blue = (tokenizer.encode(" ".join([*same, last]), max_length) for last in ("red", "blue"))

    assert time.perf_counter() - start < 10
    assert red.num_cut == blue.num_cut == max(0, num_words - (max_length - 1))
    assert (red.ids != blue.ids) == (num_words < max_length)
    assert len(red.ids) == max_length
    assert red.prompt_ids[-1] == EOS


@pytest.mark.parametrize("piece", ["猫", "x", "a&amp;", "a, ", "\u200b", "Ã©", " "])
def test_dx_065_any_100k_characters_take_bounded_time(tokenizer: Tokenizer, piece: str) -> None:
    start = time.perf_counter()
    prompt = tokenizer.encode(clean_prompt((piece * 100_000)[:100_000]), 512)

    assert time.perf_counter() - start < 10
    assert prompt.prompt_ids[-1] == EOS


def test_a_tokenizer_keeps_no_state_between_calls(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode("red circle", 8)
    tokenizer.encode("red " * 100, 4)

    assert tokenizer.encode("red circle", 8) == first


def test_settings_baked_into_the_file_do_not_act(tmp_path: Path) -> None:
    backend = word_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))

    assert tokenizer.encode("a b red blue", 6).ids == (ID["a"], ID["b"], ID["red"], ID["blue"], EOS, PAD)


def test_cutting_at_the_start_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, truncation_side="left"))

    assert tokenizer.encode("a b red blue", 3) == TokenizedPrompt(
        ids=(ID["red"], ID["blue"], EOS), num_tokens=3, num_cut=2
    )


@pytest.mark.parametrize(("written", "limit"), [(None, None), (226, 226), (10**30, None), (1e30, None)])
def test_the_model_max_length(tmp_path: Path, written: float | None, limit: int | None) -> None:
    assert Tokenizer.from_folder(write_folder(tmp_path, model_max_length=written)).model_max_length == limit


@pytest.mark.parametrize("written", ["<pad>", {"__type": "AddedToken", "content": "<pad>", "lstrip": False}])
def test_the_pad_token_is_a_string_or_an_object(tmp_path: Path, written: object) -> None:
    assert Tokenizer.from_folder(write_folder(tmp_path, pad_token=written)).pad_id == PAD


# Refusals


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path)
    (folder / name).unlink()

    with pytest.raises(CheckpointError, match="is missing") as caught:
        Tokenizer.from_folder(folder)
    assert str(folder / name) in caught.value.message


def test_a_sentencepiece_model_alone_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "tokenizer.json").rename(folder / "spiece.model")

    with pytest.raises(CheckpointError, match="save_pretrained") as caught:
        Tokenizer.from_folder(folder)
    assert str(folder / "spiece.model") in caught.value.message


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00", b'"text"', b"null"])
def test_a_malformed_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_folder(tmp_path)
    (folder / name).write_bytes(content)

    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(folder)
    assert str(folder / name) in caught.value.message
    assert caught.value.exit_status == 2


def test_a_truncated_tokenizer_is_named(tmp_path: Path) -> None:
    path = write_folder(tmp_path) / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-40])

    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"pad_token": None}, "pad_token is missing"),
        ({"pad_token": 3}, "pad_token holds 3, which isn't a token"),
        ({"eos_token": {"text": "</s>"}}, "eos_token holds {'text': '</s>'}, which isn't a token"),
        ({"additional_special_tokens": "<x>", "unk_token": ["<unk>"]}, "unk_token holds ['<unk>'], which isn't"),
        ({"extra_special_tokens": [None]}, "extra_special_tokens holds None, which isn't a token"),
        ({"added_tokens_decoder": {"1": None}}, "added_tokens_decoder holds None, which isn't a token"),
        ({"added_tokens_decoder": {"one": 1}}, "added_tokens_decoder holds 1, which isn't a token"),
        ({"padding_side": "left"}, "padding_side is 'left'"),
        ({"truncation_side": "middle"}, "truncation_side is 'middle'"),
        ({"model_max_length": 0}, "model_max_length is 0"),
        ({"model_max_length": "long"}, "model_max_length is 'long'"),
    ],
)
def test_settings_that_can_not_work_are_refused(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(write_folder(tmp_path, **config))
    assert says in caught.value.message
    assert str(tmp_path / "tokenizer_config.json") in caught.value.message


def test_all_wrong_settings_are_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(write_folder(tmp_path, pad_token=3, padding_side="left", model_max_length=0))
    assert all(name in caught.value.message for name in ("pad_token", "padding_side", "model_max_length"))


# Against transformers

PROMPTS = (
    *("a red circle moving right", "A RED circle, moving RIGHT.", "", "unheard-of words", "a, b, a & b", "café 猫 🐱"),
    *("a </s> b", "<pad> a", "a<unk>b", "</s></s>", "</S>", "< pad >", "a b red blue circle moving right a b red blue"),
    *("a</s>b", "red circle moving"),
)


def added_token(content: str, **properties: bool) -> dict[str, Any]:
    """A token as transformers writes it into tokenizer_config.json."""
    defaults = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    return {"__type": "AddedToken", "content": content, **defaults, **properties}


def assert_equals_auto_tokenizer(folder: Path, texts: tuple[str, ...]) -> None:
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    for text in texts:
        for max_length in (1, 2, 5, 64):
            right = theirs(
                [text],
                padding="max_length",
                max_length=max_length,
                truncation=True,
                add_special_tokens=True,
                return_attention_mask=True,
            )
            prompt = ours.encode(text, max_length)
            assert list(prompt.ids) == right["input_ids"][0], (text, max_length)
            assert prompt.num_tokens == sum(right["attention_mask"][0]), (text, max_length)


@pytest.mark.parity
def test_dx_068_ids_equal_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=word_backend(), pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    ).save_pretrained(str(tmp_path))

    assert_equals_auto_tokenizer(tmp_path, (*PROMPTS, *(clean_prompt(text) for text in DX_068)))


@pytest.mark.parity
@pytest.mark.parametrize("in_file", [None, False, True], ids=["not-in-file", "in-file", "single-word-in-file"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"truncation_side": "left"},
        {"eos_token": None, "unk_token": None},
        {"eos_token": added_token("</s>", single_word=True)},
        {"eos_token": added_token("</s>")},
        {"added_tokens_decoder": {"1": added_token("</s>", single_word=True, special=True)}},
        {"eos_token": None, "added_tokens_decoder": {"1": added_token("</s>", special=True)}},
        {"added_tokens_decoder": {"16": added_token("red circle"), "15": added_token("moving", special=False)}},
        {"eos_token": None, "additional_special_tokens": ["</s>", "red circle"]},
        {"eos_token": None, "extra_special_tokens": ["</s>", "red circle"]},
        {"pad_token": "[PAD]"},
    ],
)
def test_ids_equal_transformers_for_special_tokens_wherever_they_are_named(
    tmp_path: Path, config: dict[str, Any], in_file: bool | None
) -> None:
    backend = word_backend()
    if in_file is not None:
        backend.add_special_tokens([tokenizers.AddedToken("</s>", normalized=False, single_word=in_file)])
    assert_equals_auto_tokenizer(write_folder(tmp_path, backend, **config), PROMPTS)


@pytest.mark.parity
def test_ids_equal_transformers_for_pieces_as_published_models_have_them(tmp_path: Path) -> None:
    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁re", -3.0), ("d", -3.5), ("▁a", -3.1)]
    pieces += [("▁cir", -4.0), ("cle", -4.5), ("▁red", -5.0), (",", -3.3), ("c", -6.0), ("é", -6.5), ("猫", -7.0)]
    pieces += [("<extra_id_1>", 0.0), ("<extra_id_0>", 0.0)]
    T5Tokenizer(vocab=pieces, extra_ids=2).save_pretrained(str(tmp_path))

    texts = ("a red circle", "a red, red é 猫 circle", "", "zzz a", "a <extra_id_0> </s> a", "🐱\u200d👤", "\u200b")
    assert_equals_auto_tokenizer(tmp_path, texts)


# House rules


def test_importing_text_imports_no_library() -> None:
    code = (
        "import sys, safelight.text\n"
        "print([name for name in ('torch', 'transformers', 'diffusers', 'tokenizers', 'ftfy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_tokenized_prompt_is_frozen(tokenizer: Tokenizer) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        tokenizer.encode("a", 4).num_cut = 1  # type: ignore[misc]
