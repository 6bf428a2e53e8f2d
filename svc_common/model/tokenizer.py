"""Text to token ids and back, as the model's own files say; used by the planner at both ends of a request.

Encoding and the chat template are transformers'. Decoding goes through a table of each token's bytes, so that a
stream can be decoded token by token, exactly and at constant cost; it is checked against transformers at the start.
"""

import codecs
import copy
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from svc_common.model import chat_template
from svc_common.model.chat_template import Tool, ToolCallFormat, Turn
from svc_common.model.spec import UnsupportedModelError
from svc_common.model.store import ModelFiles, default_cache_dir

_SPACE_MARK = "\u2581"
_PROBE = "Hello, world: 12 345 words.\n\tnaïve café, 日本語, Привет, 🎉 x"

logger = logging.getLogger(__name__)


class Tokenizer:
    """Safe to use from several threads: nothing changes once it is made."""

    def __init__(self, backend: Any) -> None:
        """`backend` is a transformers tokenizer built on the tokenizers library."""
        self._backend = backend
        fast = getattr(backend, "backend_tokenizer", None)
        if fast is None:
            raise UnsupportedModelError(
                f"{type(backend).__name__}: only tokenizers with a tokenizer.json are supported"
            )
        self._fast = fast
        # Some models' files ask for padding or truncation, which is for training.
        fast.no_padding()
        fast.no_truncation()
        self._strips_first_space = False
        self._bytes = self._token_bytes_table()
        self.vocab_size = len(self._bytes)
        self.longest_token_bytes = max(map(len, self._bytes), default=1)
        end = backend.eos_token_id
        self.eos_token_ids: tuple[int, ...] = () if end is None else (end,)
        self._check()

    def with_chat_template(self, template: str) -> "Tokenizer":
        """The same with another template, in Jinja. Raises ChatTemplateError where it is none."""
        backend = copy.copy(self._backend)
        backend.chat_template = template
        chat_template.check(backend)
        changed = copy.copy(self)
        changed._backend = backend
        return changed

    def encode(self, text: str) -> list[int]:
        """Token ids with the special tokens that the model's tokenizer adds by default."""
        ids: list[int] = self._fast.encode(text).ids
        return ids

    def encode_chat(self, turns: Sequence[Turn], tools: Sequence[Tool] = ()) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins. Raises ChatTemplateError."""
        text = chat_template.render(self._backend, turns, tools)
        # The template has written the special tokens.
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return ids

    @property
    def tool_call_format(self) -> ToolCallFormat | None:
        """How the model writes calls of the tools it is shown; None where its template teaches no known format."""
        return chat_template.tool_call_format(self._backend)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a whole sequence of tokens, special tokens left out; broken characters become U+FFFD."""
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_first_space else text

    def to_json(self) -> str:
        """In the tokenizers library's own form."""
        return str(self._fast.to_str())

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that a token adds to a text; none for special tokens and ids beyond the tokenizer's."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_name(self, token_id: int) -> str:
        """As the vocabulary writes it: the name of a special token; none beyond the tokenizer's ids."""
        return self._fast.id_to_token(token_id) or ""

    def _token_bytes_table(self) -> list[bytes]:
        """Bytes by token id. Raises UnsupportedModelError where the decoder is of another kind than these two."""
        parts = _decoder_parts(self._fast)
        added = self._fast.get_added_tokens_decoder()
        special = {index for index, token in added.items() if token.special} | set(self._backend.all_special_ids)
        if "ByteLevel" in parts:
            of_byte_level = _byte_level_alphabet()

            def to_bytes(token: str) -> bytes:
                mapped = [of_byte_level.get(character) for character in token]
                # Added tokens are written plainly, and may hold characters outside the alphabet.
                return token.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)

        elif "ByteFallback" in parts or "Metaspace" in parts:
            self._strips_first_space = "Strip" in parts or "Metaspace" in parts

            def to_bytes(token: str) -> bytes:
                if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                    return bytes([int(token[3:5], 16)])
                return token.replace(_SPACE_MARK, " ").encode()

        else:
            raise UnsupportedModelError(f"tokenizer decoder {'+'.join(parts) or 'none'} is not supported")
        table = [b""] * (max(self._fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
        for token, index in self._fast.get_vocab(with_added_tokens=True).items():
            if index not in special:
                table[index] = to_bytes(token)
        return table

    def _check(self) -> None:
        """Compares with transformers on a text that has spaces, digits and characters of two to four bytes."""
        ids = self._fast.encode(_PROBE, add_special_tokens=False).ids
        expected = self._fast.decode(ids, skip_special_tokens=True)
        if self.decode(ids) != expected:
            raise UnsupportedModelError(
                f"the tokenizer's decoder is not understood: {expected!r} != {self.decode(ids)!r}"
            )


def load_tokenizer(files: ModelFiles, cache_dir: Path | None = None) -> Tokenizer:
    """Reads the tokenizer from the model's files; a GGUF file's is converted once and kept in the cache directory, or
    each time where nothing can be kept there.

    Raises UnsupportedModelError.
    """
    if files.gguf is None:
        return Tokenizer(_read(files.directory))
    kept = (cache_dir or default_cache_dir()) / "tokenizers" / _fingerprint(files.gguf)
    if not kept.is_dir():
        converted = _read(files.gguf.parent, gguf_file=files.gguf.name)
        try:
            _keep(converted, kept)
        except OSError as error:
            logger.warning("the converted tokenizer is not kept, each start converts it anew: %s", error)
            return Tokenizer(converted)
    return Tokenizer(_read(kept))


def tokenizer_json(files: ModelFiles, cache_dir: Path | None = None) -> str:
    """The tokenizer in the tokenizers library's own form; read without transformers where it lies there already.

    Raises UnsupportedModelError.
    """
    directory = files.directory
    if files.gguf is not None:
        directory = (cache_dir or default_cache_dir()) / "tokenizers" / _fingerprint(files.gguf)
    path = directory / "tokenizer.json"
    return path.read_text() if path.is_file() else load_tokenizer(files, cache_dir).to_json()


def _read(directory: Path, **source: str) -> Any:
    """Raises UnsupportedModelError."""
    from transformers import AutoTokenizer  # Takes seconds: only who needs a tokenizer pays.

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, **source)
    except Exception as error:  # transformers raises whatever it meets; its words fill many lines.
        text = " ".join(str(error).split())
        where = directory / source.get("gguf_file", "")
        raise UnsupportedModelError(f"no tokenizer can be read from {where}: {type(error).__name__}: {text}") from error


class IncrementalDecoder:
    """Text of a stream of tokens that continues another text: whole characters only, whatever the token boundaries.

    The pieces joined are the decoding of all tokens, less an incomplete character at its end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Characters completed by this token."""
        text = self._utf8.decode(self._token_bytes(token_id))
        held: bytes = self._utf8.getstate()[0]
        # Python also waits for the end of a surrogate, for the sake of "surrogatepass"; no character begins so.
        if len(held) == 2 and held[0] == 0xED and held[1] >= 0xA0:
            text += self._utf8.decode(b"", final=True)
        return text


def _decoder_parts(fast: Any) -> list[str]:
    """Types of the steps of which the tokenizer's decoder consists."""
    decoder = json.loads(fast.to_str())["decoder"]
    if decoder is None:
        return []
    return [part["type"] for part in decoder.get("decoders", [decoder])]


def _byte_level_alphabet() -> dict[str, int]:
    """The printable characters by which byte-level BPE writes the 256 bytes (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    alphabet = {chr(byte): byte for byte in plain}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


def _fingerprint(path: Path) -> str:
    """Changes when the file does. Size and time are enough: hashing gigabytes at each start is not worth it."""
    stat = path.stat()
    key = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    return f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _keep(converted: Any, target: Path) -> None:
    """Writes a converted tokenizer so that `target` is whole or absent, also when two processes do it at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=".partial-"))
    try:
        converted.save_pretrained(partial)
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir():  # Else another process was first; both wrote the same.
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
