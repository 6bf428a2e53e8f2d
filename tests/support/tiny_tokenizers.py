"""Tokenizers small enough to build in a test, of the two kinds that the supported models have."""

from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<start>{{ message.role }}:{{ message.content }}<end>"
    "{% endfor %}{% if add_generation_prompt %}<start>assistant:{% endif %}"
)
START, END, TOOL = "<start>", "<end>", "<tool call>"
PIECES = ["th", "the", " t", " the", "ab", "abc", "日", "🎉"]


def byte_level() -> PreTrainedTokenizerFast:
    """All 256 bytes, a few longer tokens, two special tokens and one added token that is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for piece in PIECES:
        [(written, _)] = level.pre_tokenize_str(piece)
        for end in range(2, len(written) + 1):
            if written[:end] not in vocab:
                vocab[written[:end]] = len(vocab)
                merges.append((written[: end - 1], written[end - 1]))
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges))
    fast.pre_tokenizer = level
    fast.decoder = decoders.ByteLevel()
    return _wrap(fast)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As SentencePiece models are written: marked spaces, bytes for what the vocabulary lacks."""
    vocab = {"<unk>": 0}
    vocab.update({f"<0x{byte:02X}>": 1 + byte for byte in range(256)})
    for piece in ["\u2581", *"abcdefghijklmnopqrstuvwxyz.,:\u00e9", "\u2581the", "\u2581a", "the"]:
        vocab.setdefault(piece, len(vocab))
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "a")]
    vocab.setdefault("th", len(vocab))
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return _wrap(fast)


def whole_words() -> PreTrainedTokenizerFast:
    """A kind that no supported model has."""
    fast = FastTokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s"), "removed")
    fast.decoder = decoders.WordPiece()
    return _wrap(fast)


def save(tokenizer: PreTrainedTokenizerFast, directory: Path) -> Path:
    tokenizer.save_pretrained(directory)
    return directory


def _wrap(fast: FastTokenizer) -> PreTrainedTokenizerFast:
    fast.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
    fast.add_tokens([AddedToken(TOOL, special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token=START, eos_token=END, chat_template=CHAT_TEMPLATE)
