"""The load that a policy is chosen for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestMix:
    """So many requests of one shape at a time: all prompts, then all tokens of the answers."""

    prompt_tokens: int
    output_tokens: int
    num_sequences: int
    batch_tokens: int
    """Prompt tokens that one iteration computes at most."""

    @property
    def sequence_tokens(self) -> int:
        """Whose KV a sequence needs room for at its end."""
        return self.prompt_tokens + self.output_tokens

    @property
    def mean_context_tokens(self) -> float:
        """That a decode attends, its own included, halfway through the answer."""
        return self.prompt_tokens + self.output_tokens / 2

    @property
    def num_prefill_iterations(self) -> int:
        return -(-self.prompt_tokens * self.num_sequences // self.batch_tokens)

    @property
    def prefill_tokens(self) -> float:
        """Of one such iteration."""
        return self.prompt_tokens * self.num_sequences / self.num_prefill_iterations

    @property
    def num_decode_iterations(self) -> int:
        """The prompt's last iteration yields the first token."""
        return self.output_tokens - 1
