"""The table of token bytes against the tokenizers library, and loading from every kind of model file."""

import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from support import tiny_tokenizers

from svc_common.model.chat_template import ChatTemplateError, Turn
from svc_common.model.spec import UnsupportedModelError
from svc_common.model.store import ModelFiles, ModelNotFoundError, resolve
from svc_common.model.tokenizer import IncrementalDecoder, Tokenizer, load_tokenizer, tokenizer_json

BYTE_LEVEL = tiny_tokenizers.byte_level()
BYTE_FALLBACK = tiny_tokenizers.byte_fallback()
LEVEL, FALLBACK = Tokenizer(BYTE_LEVEL), Tokenizer(BYTE_FALLBACK)


def incremental(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = IncrementalDecoder(tokenizer)
    return "".join(decoder.push(token_id) for token_id in ids)


def less_incomplete_end(data: bytes) -> str:
    """Python's own decoding, without the bytes at the end that may yet become a character."""
    tails = [cut for cut in range(1, 4) if len(data) >= cut and _is_incomplete(data[-cut:])]
    return data[: len(data) - max(tails, default=0)].decode("utf-8", "replace")


def _is_incomplete(tail: bytes) -> bool:
    try:
        tail.decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"
    return False


@given(st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=40))
def test_byte_level_equals_the_library_for_any_tokens(ids: list[int]) -> None:
    assert LEVEL.decode(ids) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=60))
def test_text_survives_both_kinds(text: str) -> None:
    for token in (tiny_tokenizers.START, tiny_tokenizers.END):
        text = text.replace(token, "")
    ids = LEVEL.encode(text)
    assert LEVEL.decode(ids) == text
    assert incremental(LEVEL, ids) == text
    ids = FALLBACK.encode(text)
    assert FALLBACK.decode(ids) == BYTE_FALLBACK.decode(ids, skip_special_tokens=True)
    assert incremental(FALLBACK, ids).removeprefix(" ") == FALLBACK.decode(ids)


@given(st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=40))
@example(ids=[169, 94])  # ED A1: the start of a surrogate, and of no character.
@example(ids=[169, 94, 64])
def test_a_stream_is_the_whole_less_half_a_character(ids: list[int]) -> None:
    data = b"".join(map(LEVEL.token_bytes, ids))
    assert incremental(LEVEL, ids) == less_incomplete_end(data)


def test_a_character_comes_out_with_its_last_byte() -> None:
    decoder = IncrementalDecoder(LEVEL)
    by_bytes = {LEVEL.token_bytes(index): index for index in range(LEVEL.vocab_size)}
    pieces = [decoder.push(by_bytes[bytes([byte])]) for byte in "é🙂".encode()]
    assert pieces == ["", "é", "", "", "", "🙂"]


def test_special_tokens_have_no_text_and_added_ones_do() -> None:
    tokenizer = Tokenizer(BYTE_LEVEL)
    ids = tokenizer.encode(f"a{tiny_tokenizers.START}{tiny_tokenizers.TOOL}")
    assert tokenizer.decode(ids) == f"a{tiny_tokenizers.TOOL}"
    assert tokenizer.token_bytes(tokenizer.eos_token_ids[0]) == b""
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""


def test_chat_goes_through_the_template() -> None:
    tokenizer = Tokenizer(BYTE_LEVEL)
    ids = tokenizer.encode_chat([Turn("user", "the"), Turn("assistant", "ab")])
    text = "<start>user:the<end><start>assistant:ab<end><start>assistant:"
    assert ids == tokenizer.encode(text)
    assert ids.count(tokenizer.eos_token_ids[0]) == 2


def test_a_template_that_refuses_is_quoted() -> None:
    with pytest.raises(ChatTemplateError, match="unknown role robot"):
        Tokenizer(BYTE_LEVEL).encode_chat([Turn("robot", "beep")])


def test_no_template_is_said_plainly() -> None:
    backend = tiny_tokenizers.byte_level()
    backend.chat_template = None
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer(backend).encode_chat([Turn("user", "hi")])


def test_another_kind_of_decoder_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        Tokenizer(tiny_tokenizers.whole_words())


def test_a_directory_is_loaded_as_it_is(tmp_path: Path) -> None:
    tiny_tokenizers.save(BYTE_LEVEL, tmp_path)
    tokenizer = load_tokenizer(ModelFiles("tiny", tmp_path), tmp_path / "unused")
    assert tokenizer.encode("the abc") == Tokenizer(BYTE_LEVEL).encode("the abc")
    assert not (tmp_path / "unused").exists()


def test_the_library_s_own_form_is_read_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_tokenizers.save(BYTE_LEVEL, tmp_path)

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("transformers takes seconds")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    text = tokenizer_json(ModelFiles("tiny", tmp_path))
    assert tokenizers.Tokenizer.from_str(text).encode("the abc").ids == Tokenizer(BYTE_LEVEL).encode("the abc")


@pytest.mark.parametrize("text", [None, "{", "[]", "not JSON\nat all"])
def test_a_missing_or_broken_tokenizer_is_said_in_one_line(text: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UnsupportedModelError, match=f"no tokenizer can be read from {tmp_path}") as caught:
        load_tokenizer(ModelFiles("none", tmp_path))
    assert "\n" not in str(caught.value)


def test_training_leftovers_do_not_cut_prompts(tmp_path: Path) -> None:
    backend = tiny_tokenizers.byte_level()
    backend.backend_tokenizer.enable_truncation(max_length=2)
    backend.backend_tokenizer.enable_padding(length=9)
    assert len(Tokenizer(backend).encode("xyz")) == 3


@pytest.fixture
def gguf() -> ModelFiles:
    try:
        return resolve("smollm2-135m-instruct")
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def _converted_once() -> Iterator[None]:
    """transformers takes seconds to convert a file."""
    original = transformers.AutoTokenizer.from_pretrained
    results: dict[Path, Any] = {}

    def remembering(directory: Path, **options: Any) -> Any:
        if "gguf_file" not in options:
            return original(directory, **options)
        file = (directory / options["gguf_file"]).resolve()
        if file not in results:
            results[file] = original(directory, **options)
        return deepcopy(results[file])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.AutoTokenizer, "from_pretrained", remembering)
        yield


@pytest.mark.usefixtures("_converted_once")
def test_gguf_is_converted_once_and_again_when_the_file_changes(
    gguf: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gguf.gguf is not None
    copy = tmp_path / "model.gguf"
    copy.symlink_to(gguf.gguf)
    conversions: list[Any] = []
    original = transformers.AutoTokenizer.from_pretrained

    def watched(*args: Any, **options: Any) -> Any:
        if "gguf_file" in options:
            conversions.append(options["gguf_file"])
            return tiny_tokenizers.byte_level() if len(conversions) > 1 else original(*args, **options)
        return original(*args, **options)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", watched)
    files = ModelFiles("model", tmp_path, copy)
    first = load_tokenizer(files, tmp_path / "cache")
    assert first.decode(first.encode("naïve 日本 🙂 one  two")) == "naïve 日本 🙂 one  two"
    assert (first.vocab_size, first.eos_token_ids) == (49152, (2,))
    chat = first.encode_chat([Turn("user", "hi")])
    assert chat[0] == 1
    assert first.decode(chat).endswith("user\nhi\nassistant\n")
    assert load_tokenizer(files, tmp_path / "cache").encode("abc") == first.encode("abc")
    assert len(conversions) == 1
    copy.unlink()
    copy.write_bytes(b"another file")
    os.utime(copy, ns=(1, 1))
    assert load_tokenizer(files, tmp_path / "cache").vocab_size == Tokenizer(BYTE_LEVEL).vocab_size
    assert len(conversions) == 2
    assert [path.name for path in (tmp_path / "cache" / "tokenizers").iterdir() if path.name.startswith(".")] == []


@pytest.mark.usefixtures("_converted_once")
def test_gguf_is_served_where_nothing_can_be_kept(
    gguf: ModelFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").touch()
    unkept = load_tokenizer(gguf, tmp_path / "cache")
    assert caplog.messages[0].startswith("the converted tokenizer is not kept, each start converts it anew: ")
    kept = load_tokenizer(gguf, tmp_path / "elsewhere")
    for text in ("naïve 日本 🙂 one  two", "<|im_start|>user"):
        assert unkept.encode(text) == kept.encode(text)
        assert unkept.decode(unkept.encode(text)) == kept.decode(kept.encode(text))
    assert unkept.encode_chat([Turn("user", "hi")]) == kept.encode_chat([Turn("user", "hi")])
    assert (unkept.vocab_size, unkept.eos_token_ids) == (kept.vocab_size, kept.eos_token_ids)
    one, other = (
        tokenizers.Tokenizer.from_str(tokenizer_json(gguf, tmp_path / name)) for name in ("cache", "elsewhere")
    )
    assert one.encode("naïve 日本").ids == other.encode("naïve 日本").ids == kept.encode("naïve 日本")
