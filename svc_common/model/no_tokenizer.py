"""What stands for a tokenizer where a model without weights has none: requests and answers are token ids."""

from collections.abc import Sequence

from svc_common.model.chat_template import Tool, ToolCallFormat, Turn
from svc_common.model.store import ModelFiles
from svc_common.model.tokenizer import Tokenizer

NO_TOKENIZER = "the model has no tokenizer"
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def has_tokenizer(files: ModelFiles) -> bool:
    """Whether one lies beside the model; GGUF files have theirs inside."""
    return files.gguf is not None or any((files.directory / name).is_file() for name in _FILES)


class NoTokenizer(Tokenizer):
    """Each token has an empty text. Who has text to encode must not ask."""

    vocab_size = 0
    longest_token_bytes = 0
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._bytes: list[bytes] = []
        self._strips_first_space = False

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError(NO_TOKENIZER)

    def encode_chat(self, turns: Sequence[Turn], tools: Sequence[Tool] = ()) -> list[int]:
        raise NotImplementedError(NO_TOKENIZER)

    @property
    def tool_call_format(self) -> ToolCallFormat | None:
        return None

    def token_name(self, token_id: int) -> str:
        return ""
