"""Says when a running service should change its policy; time and load come in as arguments."""

from dataclasses import dataclass

from planner_svc.policy.estimate import Prediction
from planner_svc.policy.mix import RequestMix
from planner_svc.policy.search import NoPolicyError, PolicySearch
from svc_common.policy import ExecutionPolicy

_GAIN = 1.1
"""In predicted throughput that a change must promise."""
_PERSISTENCE = 3
"""Questions in a row that must have promised it: a burst of odd requests is no reason."""
_HORIZON_S = 60.0
"""Over which a change must save more than it costs."""
_PAYBACK = 2.0
"""Times its cost, at least, that a change saves over the horizon: the load may turn again."""
_REST_S = 30.0
"""After a change."""
_MOST_FOUND = 256
"""Mixes whose best policy is remembered."""


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """Worth its cost."""

    policy: ExecutionPolicy
    gain: float
    """Predicted throughput over that of the present policy, for the mix asked about."""
    cost_s: float
    """Until the service is as far as it was."""


class PolicyChooser:
    """Of one service; remembers what the last questions would have answered."""

    def __init__(self, search: PolicySearch, policy: ExecutionPolicy) -> None:
        self._search = search
        self.policy = policy
        """That runs."""
        self._found: dict[RequestMix, Prediction | None] = {}
        """The best for a mix asked about before; None where nothing fits."""
        self._num_promising = 0
        self._next_change_s = float("-inf")

    def first(self, mix: RequestMix) -> ExecutionPolicy:
        """The best for a mix, whatever a change costs: of a service that has nothing in hand."""
        best = self._best(mix)
        return best.policy if best else self.policy

    def consider(self, mix: RequestMix, running_tokens: int, now_s: float) -> PolicyChange | None:
        """To be asked now and then. `running_tokens`: computed so far of sequences that run, and lost by a change.

        The service opens a new epoch with the answer and calls `changed`, or keeps what it has.
        """
        if now_s < self._next_change_s:
            return None
        best = self._best(mix)
        if best is None:
            return None
        present = self._search.estimator.predict(self.policy, mix)
        gain = present.total_s / best.total_s
        if best.policy == self.policy or gain < _GAIN:
            self._num_promising = 0
            return None
        self._num_promising += 1
        cost_s = self.cost_s(best.policy, mix, running_tokens)
        saved_s = _HORIZON_S * (1 - 1 / gain)
        if self._num_promising < _PERSISTENCE or saved_s < _PAYBACK * cost_s:
            return None
        return PolicyChange(best.policy, gain, cost_s)

    def changed(self, policy: ExecutionPolicy, now_s: float) -> None:
        """The service runs by it now."""
        self.policy = policy
        self._num_promising = 0
        self._next_change_s = now_s + _REST_S

    def _best(self, mix: RequestMix) -> Prediction | None:
        """Searches, which takes up to seconds, at most once for a mix."""
        if mix not in self._found:
            if len(self._found) >= _MOST_FOUND:
                self._found.clear()
            try:
                self._found[mix] = self._search.compare(mix).best
            except NoPolicyError:
                self._found[mix] = None
        return self._found[mix]

    def cost_s(self, policy: ExecutionPolicy, mix: RequestMix, running_tokens: int) -> float:
        """Newly resident layers over the link, and what runs computed again at the new policy's rate of prefill."""
        estimator = self._search.estimator
        sums = estimator.model.weight_sums
        before, after = (sums[-1 - item.resident_layers] for item in (self.policy, policy))
        load_s = max(0, before - after) / estimator.machine.link.up_bytes_per_s
        prefill = estimator.predict(policy, mix).prefill
        return load_s + running_tokens * prefill.total_s / (mix.num_sequences * mix.prompt_tokens)
