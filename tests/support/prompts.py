"""Varied prompts: prose, code, lists, other scripts, one word, and one of 1,500 tokens."""

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived a",
    "def fibonacci(n):\n    ",
    "Q: What is the boiling point of water at sea level?\nA:",
    "Gravity",
    "1, 1, 2, 3, 5, 8, 13,",
    "Die Grünen Wälder öffnen sich; 日本の首都は東京です。 Ελληνικά 🙂🚀 — naïve café:",
    "Dear Sir or Madam,\n\nI am writing to complain about the",
    '{"name": "Ada", "born": 1815, "works": [',
    "<|im_start|>user\nName three planets.<|im_end|>\n<|im_start|>assistant\n",
    "The quick brown fox jumps over the lazy dog. " * 12,
)

_SENTENCE = (
    "In year {0} the expedition measured {1} meters of ice, found {2} new species and named them after its crew. "
)


def long_text() -> str:
    """More than 1,500 tokens that do not repeat."""
    return "".join(_SENTENCE.format(1900 + i, (i * 7919) % 1000, (i * 31) % 17) for i in range(60))
