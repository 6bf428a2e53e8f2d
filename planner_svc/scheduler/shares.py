"""How classes of one priority share the executor: each gets tokens in proportion to its share while all have work.

A class's counter is its tokens, of prompts and answers, divided by its share; the class with the lowest goes first. One
that begins to compete, after it had nothing to do or while a higher priority kept it out, is lifted to the lowest
counter of those that compete: nobody saves up tokens for later (virtual token counters: Sheng et al., "Fairness in
Serving Large Language Models", OSDI 2024).
"""

from collections import defaultdict
from collections.abc import Iterable, Set

from planner_svc.scheduler.batch import Batch
from planner_svc.scheduler.sequence import Sequence, ServiceClass


class Shares:
    """The counters of all classes seen so far."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._competing: frozenset[str] = frozenset()

    @property
    def is_single(self) -> bool:
        """One class has nobody to share with."""
        return len(self._counters) < 2

    def meet(self, service_class: ServiceClass) -> None:
        """A request of this class is here."""
        self._counters.setdefault(service_class.name, 0.0)

    def compete(self, names: Set[str]) -> None:
        """These classes have prompts that wait at the highest priority."""
        if not names or names == self._competing:
            return
        lowest = min((self._counters[name] for name in self._competing), default=0.0)
        for name in names - self._competing:
            self._counters[name] = max(self._counters[name], lowest)
        self._competing = frozenset(names)

    def charge(self, batch: Batch) -> None:
        """A plan computes these tokens of prompts, and one of an answer for each sequence that gets one."""
        for chunk in (*batch.chunks[0], *batch.chunks[1]):
            self._charge(chunk.sequence.request.service_class, chunk.num_tokens)
        for sequence in batch.sequences_with_output():
            self._charge(sequence.request.service_class, 1)

    def _charge(self, service_class: ServiceClass, num_tokens: int) -> None:
        self._counters[service_class.name] += num_tokens / service_class.share

    def turns(self, prompts: Iterable[tuple[Sequence, int]]) -> dict[int, float]:
        """What each prompt's class will have had when its turn comes, by sequence id.

        `prompts`: (prompt, its tokens left), those of one class in their order.
        """
        ahead: defaultdict[str, float] = defaultdict(float, self._counters)
        turns = {}
        for sequence, num_left in prompts:
            service_class = sequence.request.service_class
            turns[sequence.sequence_id] = ahead[service_class.name]
            ahead[service_class.name] += num_left / service_class.share
        return turns
